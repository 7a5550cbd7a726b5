"""What is used of SGLang, and the check that it is as expected."""
