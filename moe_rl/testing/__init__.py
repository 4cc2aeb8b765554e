"""Tools to test with, for this project's tests and for yours: `launcher` runs functions on several local processes,
`kernels` has the problems of kernel tests and compiles every launch for GPUs that are not there.

Nothing else of moe_rl imports them. What recipes need as well is elsewhere: Megatron on a CPU is
`moe_rl.megatron.on_cpu`.
"""
