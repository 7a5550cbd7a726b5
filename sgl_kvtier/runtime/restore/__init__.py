"""Carries out restorations: device slots, loads, copies, and attaching loaded pages."""
