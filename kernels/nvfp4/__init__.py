"""An experiment: NVFP4, four bits per element, for forward passes that need no gradient, as rollouts."""
