#include "bindings.h"

NB_MODULE(_native, module) {
    module.doc() = "Hot loops of moe_rl in C++: counting and drawing routes, the searches of the planner, and the "
                   "order of a weight sync.";
    bind_reduce(module);
    bind_planner(module);
    bind_draw_routes(module);
    bind_exact_split(module);
    bind_routes_codec(module);
    bind_sync_schedule(module);
    module.def(
        "sources_digest", [] { return MOE_RL_SOURCES_DIGEST; }, "Return the SHA-256 of the sources of this core.");
}
