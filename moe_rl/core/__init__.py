"""The nouns of moe_rl: traces, topology, layouts, loads, placements, plans and costs. Needs numpy only."""
