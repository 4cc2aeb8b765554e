#include "bindings.h"

NB_MODULE(_native, module) {
    module.doc() = "Hot loops of moe_rl in C++. Each has a numpy form with identical results beside its caller.";
    bind_reduce(module);
    bind_planner(module);
}
