"""Keeps bytes: a packed, verified, bounded page store on local disk. Knows no tokens and no tiers.
See README.md.
"""
