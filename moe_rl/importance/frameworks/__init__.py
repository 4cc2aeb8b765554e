"""Every objective and correction with the signatures that frameworks call; loading a module loads no framework."""
