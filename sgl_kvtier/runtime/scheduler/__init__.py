"""The hooks in SGLang's scheduler: step, radix cache, admission."""
