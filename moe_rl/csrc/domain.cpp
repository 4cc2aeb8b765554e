#include "domain.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

namespace moe_rl {

namespace {

// Halvings of the target that the backtracking search is worth. With 3 no price rises by more than .005 %.
constexpr int TARGET_STEPS = 6;

constexpr std::size_t WITHOUT_LIMIT = std::numeric_limits<std::size_t>::max();

constexpr std::int64_t WHOLE = std::int64_t{1} << 60; // ranks a class of pairs above every quota

// What it is worth to put `quota` rows of a rank with so much `excess` into a hole.
std::int64_t score_of(Method method, std::int64_t quota, std::int64_t hole, std::int64_t excess) {
    if (method == Method::USEFUL)
        return 1000 * std::min(quota, excess) + (quota == hole ? hole : 0);
    return quota == hole ? WHOLE + hole : quota;
}

} // namespace

void Domain::reset(int ranks) {
    ranks_ = ranks;
    added_.clear();
    home_load_.assign(ranks, 0);
}

void Domain::finish() {
    // By rank, then the largest first: ranks have a few experts each.
    first_.assign(ranks_ + 1, 0);
    for (const Item &item : added_)
        ++first_[item.rank + 1];
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    next_ = first_;
    sorted_.resize(added_.size());
    largest_item_ = 0;
    met_target_ = -1;
    for (const Item &item : added_) {
        const auto before = [&](const Item &other) {
            return item.rows != other.rows ? item.rows > other.rows : item.expert < other.expert;
        };
        int at = next_[item.rank]++;
        for (; at > first_[item.rank] && before(sorted_[at - 1]); --at)
            sorted_[at] = sorted_[at - 1];
        sorted_[at] = item;
        home_load_[item.rank] += item.rows;
        largest_item_ = std::max(largest_item_, item.rows);
    }
    added_.swap(sorted_);
    total_ = highest_ = 0;
    donors_.resize(ranks_);
    for (int rank = 0; rank < ranks_; ++rank) {
        total_ += home_load_[rank];
        highest_ = std::max(highest_, home_load_[rank]);
        donors_[rank] = rank;
    }
    std::ranges::stable_sort(donors_, std::greater<>(), [&](int rank) { return home_load_[rank]; });
}

std::int64_t Domain::lower_bound(const Limits &limits) const {
    // A rank can hold its own rows and at most R foreign experts, each no larger than the largest one there is: with
    // ranks of 100 and 0 rows, experts of at most 30 and R = 1, the second rank can take over 30, so that no target
    // below 70 can be met although the mean is 50. Finding that here is cheap; every target that the search need not
    // try saves two greedy runs.
    std::int64_t low = (total_ + ranks_ - 1) / ranks_, high = std::max(low, highest_);
    while (low < high) {
        const std::int64_t target = low + (high - low) / 2;
        std::int64_t room = 0;
        for (int rank = 0; rank < ranks_; ++rank)
            room += std::min(target, home_load_[rank] + limits.slots * largest_item_);
        if (room >= total_)
            high = target;
        else
            low = target + 1;
    }
    return low;
}

void Domain::start(int slots) {
    load_ = home_load_;
    left_.resize(added_.size());
    for (std::size_t item = 0; item < added_.size(); ++item)
        left_[item] = added_[item].rows;
    slots_.assign(ranks_, slots);
    holds_.assign(slots > 1 ? added_.size() * static_cast<std::size_t>(ranks_) : 0, 0);
    moves_.clear();
}

// Rows move from the home of an expert alone: `left_` says what is still there, `load_` what each rank computes by now.
void Domain::move(int item, int rank, std::int64_t quota) {
    const int home = added_[item].rank;
    load_[home] -= quota;
    load_[rank] += quota;
    left_[item] -= quota;
    --slots_[rank];
    if (!holds_.empty())
        holds_[static_cast<std::size_t>(item) * ranks_ + rank] = 1;
    moves_.push_back({item, rank, quota});
}

void Domain::undo_move() {
    const Copy last = moves_.back();
    moves_.pop_back();
    load_[added_[last.expert].rank] += last.quota;
    load_[last.rank] -= last.quota;
    left_[last.expert] += last.quota;
    ++slots_[last.rank];
    if (!holds_.empty())
        holds_[static_cast<std::size_t>(last.expert) * ranks_ + last.rank] = 0;
}

// The busiest rank fills one receiver after another until none is above the target. A receiver may be filled beyond
// what the donor had to give (up to the target), since a slot that is used up half full is lost. What is scored:
// USEFUL takes the piece that removes most excess, and among equal ones a full hole; EXACT full holes first, deepest
// first. Terminates: every move uses a slot. An attempt that would need `fewer_than` copies or more fails.
//
// Holes are scored one by one: 3,000 nodes of 64 ranks took 0.14 s so and 0.12 s in vectors, nodes of 8 or 16 the same.
bool Domain::attempt(Method method, std::int64_t target, const Limits &limits, std::size_t fewer_than) {
    start(limits.slots);
    // A rank whose slots are used up is lost with what room it still had. All rows have to find a place, so that no more
    // than this may be lost: three ranks with 178 rows under the target 60 have 2 rows of room to spare, and an attempt that
    // leaves a rank at 57 with its slots used up has failed, whatever follows.
    std::int64_t may_lose = target * ranks_ - total_;
    receivers_.clear();
    holes_.clear();
    for (int rank = 0; rank < ranks_; ++rank)
        if (slots_[rank] > 0 && target - load_[rank] > 0) {
            receivers_.push_back(rank);
            holes_.push_back(target - load_[rank]);
        }
    above_.clear();
    for (std::size_t i = 0; i < donors_.size() && load_[donors_[i]] > target; ++i)
        above_.push_back(donors_[i]);
    for (std::size_t served = 0; served < above_.size();) {
        const int donor = above_[served];
        const std::int64_t excess = load_[donor] - target;
        if (moves_.size() + above_.size() - served >= fewer_than) // each of them has yet to give
            return false;
        Pair best{-1, 0, 0, 0};
        for (int item = first_[donor]; item < first_[donor + 1]; ++item) {
            const std::int64_t available = left_[item];
            if (available < 1)
                continue;
            for (std::size_t i = 0; i < receivers_.size(); ++i) {
                const int rank = receivers_[i];
                std::int64_t quota = std::min(available, holes_[i]);
                if (method == Method::USEFUL && slots_[rank] > 1)
                    quota = std::min(quota, excess);
                const std::int64_t score = score_of(method, quota, holes_[i], excess);
                if (score > best.score && quota > 0 && !holds(item, rank))
                    best = {score, quota, item, rank};
            }
        }
        if (best.score < 0)
            return false;
        move(best.item, best.rank, best.quota);
        may_lose -= slots_[best.rank] == 0 ? target - load_[best.rank] : 0;
        if (may_lose < 0)
            return false;
        update_receiver(best.rank, target);
        if (load_[donor] <= target) {
            ++served;
            update_receiver(donor, target);
            continue;
        }
        std::size_t at = served; // the busiest stands first, the lowest of equal ones
        const auto before = [&](int a, int b) { return load_[a] != load_[b] ? load_[a] > load_[b] : a < b; };
        for (; at + 1 < above_.size() && before(above_[at + 1], donor); ++at)
            above_[at] = above_[at + 1];
        above_[at] = donor;
    }
    return true;
}

// Enters or removes a rank whose load or slots changed.
void Domain::update_receiver(int rank, std::int64_t target) {
    const auto at = std::lower_bound(receivers_.begin(), receivers_.end(), rank) - receivers_.begin();
    const bool listed = at < std::ssize(receivers_) && receivers_[at] == rank;
    const std::int64_t hole = slots_[rank] > 0 ? target - load_[rank] : 0;
    if (hole < 1) {
        if (listed) {
            receivers_.erase(receivers_.begin() + at);
            holes_.erase(holes_.begin() + at);
        }
    } else if (listed) {
        holes_[at] = hole;
    } else {
        receivers_.insert(receivers_.begin() + at, rank);
        holes_.insert(holes_.begin() + at, hole);
    }
}

// Fills the deepest hole from every rank in turn, also from ranks below the target, which then have deeper holes
// themselves. What may be lost bounds it as it does the methods, and is what makes a search of `nodes_left` (200) steps
// worth its time: close to the mean nearly every branch dies at once.
bool Domain::backtrack(std::int64_t target, int &nodes_left) {
    if (std::ranges::max(load_) <= target)
        return true;
    if (--nodes_left < 0)
        return false;
    std::int64_t may_lose = target * ranks_ - total_, deepest = 0;
    int receiver = -1;
    for (int rank = 0; rank < ranks_; ++rank) {
        const std::int64_t hole = target - load_[rank];
        if (slots_[rank] == 0)
            may_lose -= std::max<std::int64_t>(hole, 0);
        else if (hole > deepest) {
            receiver = rank;
            deepest = hole;
        }
    }
    if (receiver < 0 || may_lose < 0)
        return false;
    std::vector<Pair> pairs;
    for (int donor = 0; donor < ranks_; ++donor) {
        const int item = donor == receiver ? -1 : item_for(donor, receiver, deepest);
        const std::int64_t quota = item < 0 ? 0 : std::min(left_[item], deepest);
        if (quota > 0)
            pairs.push_back({load_[donor] + (quota == deepest ? WHOLE : 0), quota, item, receiver});
    }
    std::ranges::stable_sort(pairs, std::greater<>(), &Pair::score);
    for (const Pair &pair : pairs) {
        if (nodes_left < 0)
            return false;
        move(pair.item, pair.rank, pair.quota);
        if (backtrack(target, nodes_left))
            return true;
        undo_move();
    }
    if (deepest > may_lose)
        return false;
    const int slots = slots_[receiver];
    slots_[receiver] = 0; // leave it as it is
    const bool found = backtrack(target, nodes_left);
    slots_[receiver] = slots;
    return found;
}

// The smallest of the donor's experts that fills the hole, so that larger ones are left for deeper ones; else its
// largest.
int Domain::item_for(int donor, int receiver, std::int64_t hole) const {
    int chosen = -1;
    for (int item = first_[donor]; item < first_[donor + 1]; ++item) {
        if (left_[item] == 0 || holds(item, receiver))
            continue;
        const bool fills = left_[item] >= hole, chosen_fills = chosen >= 0 && left_[chosen] >= hole;
        if (chosen < 0 || (fills && !chosen_fills) ||
            (fills == chosen_fills && (fills ? left_[item] < left_[chosen] : left_[item] > left_[chosen])))
            chosen = item;
    }
    return chosen;
}

void Domain::take(std::vector<Copy> &copies) const {
    copies = moves_;
    for (Copy &copy : copies)
        copy.expert = added_[copy.expert].expert;
}

bool Domain::first_feasible(std::int64_t target, const Limits &limits, std::vector<Copy> &copies) {
    for (int method = 0; method < NUM_METHODS; ++method)
        if (attempt(static_cast<Method>(method), target, limits, WITHOUT_LIMIT)) {
            take(copies);
            met_target_ = target;
            met_by_ = method;
            return true;
        }
    return false;
}

void Domain::fewest_copies(std::int64_t target, const Limits &limits, std::vector<Copy> &copies) {
    for (int method = target == met_target_ ? met_by_ + 1 : 0; method < NUM_METHODS; ++method)
        if (attempt(static_cast<Method>(method), target, limits, copies.size()))
            take(copies);
}

std::int64_t Domain::lowest_target(std::int64_t floor, const Limits &limits, std::vector<Copy> &copies) {
    copies.clear();
    std::int64_t low = std::max(floor, lower_bound(limits)), high = highest_;
    if (limits.slots == 0 || high <= low)
        return std::max(high, floor);
    if (first_feasible(low, limits, copies))
        return low;
    // What a greedy meets is not monotone in the target, so halving finds a good target, not surely the lowest. The
    // backtracking search then tries below it, at the bound itself first.
    const std::int64_t lowest = low;
    while (high - low > limits.tolerance) {
        const std::int64_t target = low + (high - low) / 2;
        (first_feasible(target, limits, copies) ? high : low) = target;
    }
    low = lowest;
    for (int step = 0; step < TARGET_STEPS && limits.search_nodes > 0 && high - low > limits.tolerance; ++step) {
        const std::int64_t target = step == 0 ? low : low + (high - low) / 2;
        int nodes_left = limits.search_nodes;
        start(limits.slots);
        if (backtrack(target, nodes_left)) {
            high = target;
            take(copies);
            met_target_ = -1;
        } else {
            low = target;
        }
        if (step == 0 && high == target)
            break;
    }
    return high;
}

} // namespace moe_rl
