"""Arrivals at a server: recorded and generated sessions, and how they become prompts. Start at
`session`.
"""
