// Decodes blocks of routes: sets of K of E experts per token and layer. moe_rl/routes/blocks.py says what a block is and
// writes it; nothing here trusts a byte of it. A header alone, so that a fuzzer needs no Python.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace moe_rl {

namespace routes {

using Wide = unsigned __int128; // 512 choose 10 has 69 bits
constexpr int MAX_TOP_K = 64;
constexpr int PAD = 16;         // bytes after a copy of a block that a load may touch

inline int width_of(std::uint64_t x) { return 64 - std::countl_zero(x); }
inline int width_of(Wide x) {
    const auto high = static_cast<std::uint64_t>(x >> 64);
    return high ? 64 + width_of(high) : width_of(static_cast<std::uint64_t>(x));
}

inline std::uint64_t load(const std::uint8_t *data) {
    std::uint64_t word; // little-endian machines only, as all of the core's
    std::memcpy(&word, data, 8);
    return word;
}

// `width` <= 56 bits that begin at bit `at`.
inline std::uint64_t bits_at(const std::uint8_t *data, std::int64_t at, int width) {
    return load(data + (at >> 3)) >> (at & 7) & ((std::uint64_t{1} << width) - 1);
}

// The largest c with C(c, place) <= x, without a search: the leading bits of x select a cell of x's range that is so
// narrow that c takes at most two values in it.
template <class Number> class Place {
  public:
    Place(int items, int place) : choose_(items + 2) {
        choose_[0] = place == 0;
        for (int c = 1; c <= items; ++c)
            choose_[c] = c < place ? 0 : c == place ? 1 : times(choose_[c - 1], c, c - place);
        choose_[items + 1] = ~Number{0};
        while (!fill(++bits_))
            ;
    }
    Number choose(int c) const { return choose_[c]; }
    // Takes C(c, place) off every x and writes c. Locals, because a store of bytes might alias a member.
    void take(Number *__restrict x, std::int64_t count, std::uint16_t *__restrict c) const {
        const Cell *const cells = cells_.data();
        const int bits = bits_;
        for (std::int64_t i = 0; i < count; ++i) {
            const Cell cell = cells[cell_of(x[i] + 1, bits)];
            const Number rest = x[i] - cell.below;
            const bool more = rest >= cell.step; // a coin toss: arithmetic, as a branch would be mispredicted half the time
            x[i] = rest - (cell.step & -static_cast<Number>(more));
            c[i] = static_cast<std::uint16_t>(cell.c + more);
        }
    }
    // before * c / by where by divides the product, which may not fit.
    static Number times(Number before, int c, int by) { return before / by * c + before % by * c / by; }

  private:
    struct Cell {
        Number below, step; // C(c, place), and what C(c + 1, place) has more
        std::uint16_t c;
    };
    bool fill(int bits) {
        const int items = static_cast<int>(choose_.size()) - 2;
        cells_.resize(static_cast<std::size_t>(width_of(choose_[items]) + 1) << bits);
        int c = 0;
        for (std::size_t cell = 0; cell < cells_.size(); ++cell) {
            const Number low = lowest(cell, bits);
            const Number next = cell + 1 < cells_.size() ? lowest(cell + 1, bits) : low;
            while (choose_[c + 1] < low)
                ++c;
            if (next > low + 1 && choose_[std::min(c + 2, items + 1)] < next - 1)
                return false;
            cells_[cell] = {choose_[c], choose_[c + 1] - choose_[c], static_cast<std::uint16_t>(c)};
        }
        return true;
    }
    // The exponent and first `bits` bits of the mantissa of x >= 1: as a double they stand side by side, and converting
    // is cheaper than counting zeros. Exact below 2^53.
    static std::size_t cell_of(std::uint64_t x, int bits) {
        const auto word = std::bit_cast<std::uint64_t>(static_cast<double>(static_cast<std::int64_t>(x)));
        return (word >> (52 - bits)) - (std::size_t{1023} << bits);
    }
    static std::size_t cell_of(Wide x, int bits) {
        const int octave = width_of(x) - 1;
        const auto mantissa = static_cast<std::size_t>(octave >= bits ? x >> (octave - bits) : x << (bits - octave));
        return (static_cast<std::size_t>(octave) << bits) + (mantissa & ((std::size_t{1} << bits) - 1));
    }
    // The lowest x + 1 of a cell; where several cells share one, that of the later ones lies above it.
    static Number lowest(std::size_t cell, int bits) {
        const int octave = static_cast<int>(cell >> bits), unused = bits - octave;
        const Number mantissa = (Number{1} << bits) | (cell & ((std::size_t{1} << bits) - 1));
        if (unused <= 0)
            return mantissa << -unused;
        return (mantissa + (Number{1} << unused) - 1) >> unused;
    }

    std::vector<Number> choose_;
    std::vector<Cell> cells_;
    int bits_ = 1;
};

// The fields of an INDEX block; `index_fields` of subsets.py chooses and explains them.
struct IndexFields {
    int low_bits = 0;        // in planes of 32 bits, the last one of fewer
    std::uint64_t radix = 0; // of the digits above; 0: the sets have no index
    int group = 1;           // digits of a word

    int word_bits(std::int64_t digits) const {
        std::uint64_t power = 1;
        for (std::int64_t i = 0; i < digits; ++i)
            power *= radix;
        return width_of(power - 1);
    }
    std::int64_t num_bytes(std::int64_t rows) const {
        std::int64_t bytes = (rows / group * word_bits(group) + word_bits(rows % group) + 7) / 8;
        for (int shift = 0; shift < low_bits; shift += 32)
            bytes += (rows * std::min(32, low_bits - shift) + 7) / 8;
        return bytes;
    }
    template <class Number> void unpack(const std::uint8_t *data, std::int64_t rows, Number *numbers) const {
        for (int shift = 0, width; shift < low_bits; shift += 32, data += (rows * width + 7) / 8) {
            width = std::min(32, low_bits - shift);
            for (std::int64_t row = 0; row < rows; ++row)
                numbers[row] |= static_cast<Number>(bits_at(data, row * width, width)) << shift;
        }
        const int bits = word_bits(group);
        const std::uint64_t reciprocal = radix > 1 ? ~std::uint64_t{0} / radix + 1 : 0;
        for (std::int64_t row = 0, at = 0; row < rows; row += group, at += bits) {
            const std::int64_t digits = std::min<std::int64_t>(group, rows - row);
            std::uint64_t word = bits_at(data, at, digits == group ? bits : word_bits(digits));
            for (std::int64_t i = 0; i < digits; ++i) {
                const auto rest = static_cast<std::uint64_t>(static_cast<Wide>(word) * reciprocal >> 64);
                numbers[row + i] |= static_cast<Number>(word - rest * radix) << low_bits;
                word = rest;
            }
        }
    }
};

template <class Number> class Sets {
  public:
    Sets(int experts, int top_k, const IndexFields &fields) : top_k_(top_k), fields_(fields) {
        for (int place = 1; place <= top_k; ++place)
            places_.emplace_back(experts, place);
        total_ = places_.back().choose(experts);
        // The lowest members come from a table of all their sets, where that stays in the second-level cache.
        while (tail_ < top_k && places_[tail_].choose(experts) <= 1 << 16)
            ++tail_;
        const auto sets = static_cast<std::int64_t>(places_[tail_ - 1].choose(experts));
        table_.resize(sets * tail_);
        std::vector<Number> numbers(sets);
        for (std::int64_t set = 0; set < sets; ++set)
            numbers[set] = set;
        std::vector<std::uint16_t> members(sets);
        for (int place = tail_; place > 0; --place) {
            places_[place - 1].take(numbers.data(), sets, members.data());
            for (std::int64_t set = 0; set < sets; ++set)
                table_[set * tail_ + place - 1] = members[set];
        }
    }
    template <class Id> bool decode(const std::uint8_t *data, std::int64_t size, std::int64_t rows, Id *out) const {
        if (size != fields_.num_bytes(rows))
            return false;
        std::vector<Number> numbers(rows);
        fields_.unpack(data, rows, numbers.data());
        if (std::any_of(numbers.begin(), numbers.end(), [this](Number number) { return number >= total_; }))
            return false;
        // Place by place: the steps of different rows are independent, so the processor overlaps them.
        std::vector<std::uint16_t> members(rows);
        for (int place = top_k_; place > tail_; --place) {
            places_[place - 1].take(numbers.data(), rows, members.data());
            for (std::int64_t row = 0; row < rows; ++row)
                out[row * top_k_ + place - 1] = static_cast<Id>(members[row]);
        }
        for (std::int64_t row = 0; row < rows; ++row)
            for (int i = 0; i < tail_; ++i)
                out[row * top_k_ + i] = static_cast<Id>(table_[static_cast<std::int64_t>(numbers[row]) * tail_ + i]);
        return true;
    }

  private:
    int top_k_;
    Number total_;
    IndexFields fields_;
    std::vector<Place<Number>> places_;
    int tail_ = 1;
    std::vector<std::uint16_t> table_; // [sets of the lowest tail_ members, tail_]
};

// Numbers of the parts of a set in one group of experts.
struct Part {
    std::vector<Place<std::uint64_t>> places; // of 1 .. high members
    std::vector<std::uint64_t> first;         // first number of each size, then the total
    int low, escape_bits;

    Part(int items, int low_size, int high) : first{0}, low(low_size) {
        for (int place = 1; place <= high; ++place)
            places.emplace_back(items, place);
        for (int size = low; size <= high; ++size)
            first.push_back(first.back() + (size ? places[size - 1].choose(items) : 1));
        escape_bits = std::max(1, width_of(first.back() - 1));
    }
    // Members of the part with this number, to `out`; returns how many, -1 where there is none or they exceed `room`.
    template <class Id> int unrank(std::uint64_t number, int room, int base, Id *out) const {
        if (number >= first.back())
            return -1;
        int size = low;
        while (number >= first[size - low + 1])
            ++size;
        if (size > room)
            return -1;
        number -= first[size - low];
        for (int place = size; place > 0; --place) {
            std::uint16_t c;
            places[place - 1].take(&number, 1, &c);
            out[place - 1] = static_cast<Id>(base + c);
        }
        return size;
    }
};

} // namespace routes

// A layer's codes (moe_rl/routes/codebook.py); without one all pointers are null.
struct RouteCodes {
    static constexpr int BITS = 14;
    const std::uint32_t *table = nullptr;  // [groups, 2^14] symbol << 4 | length; 0: no code begins so
    const std::uint8_t *sizes = nullptr;   // [groups, symbols] members of a symbol's part, 255: escape
    const std::uint8_t *members = nullptr; // [groups, symbols, K]
    std::int64_t symbols = 0;
};

class RouteDecoder {
    using Wide = routes::Wide;

  public:
    RouteDecoder(int experts, int top_k, routes::IndexFields fields, int index_bits)
        : experts_(experts), top_k_(top_k), groups_((experts + 31) / 32), width_((experts + groups_ - 1) / groups_) {
        if (fields.radix && index_bits <= 52)
            narrow_ = std::make_unique<routes::Sets<std::uint64_t>>(experts, top_k, fields);
        else if (fields.radix)
            wide_ = std::make_unique<routes::Sets<Wide>>(experts, top_k, fields);
        for (int group = 0; group < groups_; ++group) {
            const int items = std::min(width_, experts - group * width_);
            parts_.emplace_back(items, groups_ == 1 ? top_k : 0, std::min(items, top_k));
        }
    }

    // Writes [rows] numbers of the parts in `group` of rows of ascending ids [rows, K], all in 0 .. E - 1.
    template <class Id> void rank(const Id *ids, std::int64_t rows, int group, std::uint64_t *numbers) const {
        const routes::Part &part = parts_[group];
        for (std::int64_t row = 0; row < rows; ++row, ids += top_k_) {
            int size = 0;
            std::uint64_t number = 0;
            for (int k = 0; k < top_k_; ++k)
                if (ids[k] / width_ == group)
                    number += part.places[size++].choose(ids[k] - group * width_);
            numbers[row] = number + part.first[size - part.low];
        }
    }

    int top_k() const { return top_k_; }
    int groups() const { return groups_; }

    // Writes [rows, K] ascending ids; false where the bytes are not a block of so many rows.
    template <class Id>
    bool decode(const std::uint8_t *data, std::int64_t size, std::int64_t rows, const RouteCodes &codes,
                              Id *out) const {
        enum Form : std::uint8_t { RAW, CONSTANT, INDEX, CODES };
        if (size < 1)
            return false;
        const std::uint8_t form = data[0];
        std::vector<std::uint8_t> body(data + 1, data + size);
        body.resize(size - 1 + routes::PAD);
        const std::int64_t bytes = size - 1;
        if (form == CODES)
            return this->codes(body.data(), bytes, rows, codes, out);
        if (form == INDEX)
            return narrow_ ? narrow_->decode(body.data(), bytes, rows, out)
                                  : wide_ && wide_->decode(body.data(), bytes, rows, out);
        const std::int64_t ids = (form == RAW ? rows : 1) * top_k_, id_bytes = experts_ <= 256 ? 1 : 2;
        if (form > CONSTANT || bytes != ids * id_bytes)
            return false;
        for (std::int64_t i = 0; i < ids; ++i) {
            const int id = id_bytes == 1 ? body[i] : body[2 * i] | body[2 * i + 1] << 8;
            if (id >= experts_ || (i % top_k_ && id < out[i - 1]))
                return false;
            out[i] = static_cast<Id>(id);
        }
        for (std::int64_t i = ids; i < rows * top_k_; ++i)
            out[i] = out[i - top_k_];
        return true;
    }

  private:
    // One of the two streams of a CODES block, which are decoded side by side: where a code begins is known only when
    // the one before it is, so one stream alone waits for its table.
    template <class Id> struct Lane {
        const std::uint8_t *codes, *escapes;
        std::int64_t code_bits, escape_bits;
        Id *out;
        std::int64_t at = 0, escaped = 0;

        bool whole() const { return (at + 7) / 8 * 8 == code_bits && (escaped + 7) / 8 * 8 == escape_bits; }
    };

    template <class Id> bool row(Lane<Id> &lane, const RouteCodes &codes) const {
        Id ids[2 * routes::MAX_TOP_K];
        int filled = 0;
        for (int group = 0; group < groups_; ++group) {
            if (lane.at > lane.code_bits)
                return false;
            const std::uint32_t entry = codes.table[(std::int64_t{group} << RouteCodes::BITS) +
                                                    routes::bits_at(lane.codes, lane.at, RouteCodes::BITS)];
            lane.at += entry & 15;
            const std::int64_t symbol = group * codes.symbols + (entry >> 4);
            int count = codes.sizes[symbol];
            const int room = top_k_ - filled, base = group * width_;
            if (count == 255) {
                const routes::Part &part = parts_[group];
                if (lane.escaped + part.escape_bits > lane.escape_bits)
                    return false;
                count = part.unrank(routes::bits_at(lane.escapes, lane.escaped, part.escape_bits), room, base, ids + filled);
                lane.escaped += part.escape_bits;
            } else if (count <= room) {
                // All K places, of which the next part overwrites the rest: how many there are cannot be predicted.
                const std::uint8_t *members = codes.members + symbol * top_k_;
                for (int i = 0; i < top_k_; ++i)
                    ids[filled + i] = static_cast<Id>(members[i] + base);
            }
            if (!(entry & 15) || count < 0 || count > room)
                return false;
            filled += count;
        }
        std::copy_n(ids, top_k_, lane.out);
        lane.out += top_k_;
        return filled == top_k_;
    }

    template <class Id>
    bool codes(const std::uint8_t *data, std::int64_t size, std::int64_t rows, const RouteCodes &codes, Id *out) const {
        if (!codes.table || size < 8)
            return false;
        std::uint16_t bytes[4]; // of codes and escapes of either lane
        std::memcpy(bytes, data, 8);
        if (size != 8 + bytes[0] + bytes[1] + bytes[2] + bytes[3])
            return false;
        const std::uint8_t *const first = data + 8, *const second = first + bytes[0] + bytes[1];
        Lane<Id> a{first, first + bytes[0], 8 * bytes[0], 8 * bytes[1], out};
        Lane<Id> b{second, second + bytes[2], 8 * bytes[2], 8 * bytes[3], out + (rows + 1) / 2 * top_k_};
        for (std::int64_t i = 0; i < rows / 2; ++i)
            if (!row(a, codes) || !row(b, codes))
                return false;
        return (rows % 2 == 0 || row(a, codes)) && a.whole() && b.whole();
    }

    int experts_, top_k_, groups_, width_;
    std::unique_ptr<routes::Sets<std::uint64_t>> narrow_; // numbers of whole sets, where they have at most 52 bits
    std::unique_ptr<routes::Sets<Wide>> wide_;            // where they have more
    std::vector<routes::Part> parts_;
};

} // namespace moe_rl
