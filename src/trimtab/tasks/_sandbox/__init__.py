"""A place to run untrusted code in. `launch` starts it; the other modules run inside, on the standard library alone."""
