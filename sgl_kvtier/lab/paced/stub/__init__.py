"""Models without layers: what SGLang imports in the place of its own on a paced device."""
