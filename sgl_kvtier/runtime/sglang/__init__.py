"""The symbols of SGLang that are used, and the check that they are as expected."""
