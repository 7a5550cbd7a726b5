"""Where SGLang's scheduler is hooked: step, radix cache, admission."""
