"""SGLang's server on the CUDA stand-in. README.md says what is real in it and what is not."""
