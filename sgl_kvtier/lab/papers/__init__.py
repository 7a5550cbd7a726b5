"""The papers' tables and figures beside what the simulator gives."""
