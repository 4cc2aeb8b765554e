"""Load-balance simulation as a library: open a trace, cut a step, plan, predict, report. Needs numpy, no torch."""
