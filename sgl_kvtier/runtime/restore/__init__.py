"""Carries out restorations: private slots, loads, copies, the splice."""
