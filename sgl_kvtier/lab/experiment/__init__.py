"""Comparisons of servers: arms, trials, rounds, results."""
