"""A packed, verified, bounded page store on local disk. It knows no tokens and no tiers."""
