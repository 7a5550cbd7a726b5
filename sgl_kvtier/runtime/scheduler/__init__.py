"""Connects kvtier to SGLang's scheduler: step, radix cache, admission."""
