"""The process that talks to the engine: the only place where the engine's library is imported."""
