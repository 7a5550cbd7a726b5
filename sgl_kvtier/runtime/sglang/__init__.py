"""The symbols of SGLang that are used, and checks that they are as expected."""
