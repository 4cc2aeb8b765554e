"""One function per trap; `registry` collects them."""
