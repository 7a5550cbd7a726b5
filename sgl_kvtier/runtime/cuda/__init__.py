"""Copies of pages to an NVIDIA or AMD GPU: by its copy engine into staging, then into slots."""
