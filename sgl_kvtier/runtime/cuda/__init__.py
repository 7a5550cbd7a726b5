"""Copies of pages onto an NVIDIA or AMD card: by its copy engine into staging, then into slots."""
