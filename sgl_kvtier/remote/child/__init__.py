"""The child process, which talks to the engine. Only it imports the engine's library."""
