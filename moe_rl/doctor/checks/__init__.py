"""One function per trap; `registry` lists them."""
