// Numbers for sets of experts, and the fields of bits that hold them.
//
// A set of K of E experts has one number below C(E, K): its place among all sets in colexicographic order, the sum of
// C(c_j, j) over its members c_1 < ... < c_K (the combinatorial number system). 128 choose 8 takes 40.4 bits so; 8 ids
// of one byte take 64.
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

// The same of bits that begin at the highest of a byte.
inline std::uint32_t first_bits_at(const std::uint8_t *data, std::int64_t at, int width) {
    return static_cast<std::uint32_t>(__builtin_bswap64(load(data + (at >> 3))) << (at & 7) >> (64 - width));
}

// Appends fields of at most 56 bits to bytes, lowest bit first.
class BitWriter {
  public:
    explicit BitWriter(std::vector<std::uint8_t> &out) : out_(out) {}
    void put(std::uint64_t value, int width) {
        word_ |= value << held_;
        for (held_ += width; held_ >= 8; held_ -= 8, word_ >>= 8)
            out_.push_back(static_cast<std::uint8_t>(word_));
    }
    void end() { // the last byte is filled up with zeros
        if (held_)
            out_.push_back(static_cast<std::uint8_t>(word_));
        word_ = 0, held_ = 0;
    }

  private:
    std::vector<std::uint8_t> &out_;
    std::uint64_t word_ = 0;
    int held_ = 0;
};

// The same of at most 32 bits, first bit highest: `value` has no bit above `width`.
class HighBitWriter {
  public:
    explicit HighBitWriter(std::vector<std::uint8_t> &out) : out_(out) {}
    void put(std::uint64_t value, int width) {
        word_ = word_ << width | value;
        held_ += width;
        if (held_ >= 32) {
            held_ -= 32;
            const std::uint32_t bytes = __builtin_bswap32(static_cast<std::uint32_t>(word_ >> held_));
            const auto *const first = reinterpret_cast<const std::uint8_t *>(&bytes);
            out_.insert(out_.end(), first, first + 4);
        }
    }
    void end() {
        for (; held_ > 0; held_ -= 8)
            out_.push_back(static_cast<std::uint8_t>(held_ >= 8 ? word_ >> (held_ - 8) : word_ << (8 - held_)));
        word_ = 0, held_ = 0;
    }

  private:
    std::vector<std::uint8_t> &out_;
    std::uint64_t word_ = 0;
    int held_ = 0;
};

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

// The fields of an INDEX block; `index_fields` of moe_rl/routes/sets.py chooses and explains them.
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
    // Adds to numbers [last - first] the rows first .. last - 1 of a block of `rows`; `first` begins a word.
    template <class Number>
    void unpack(const std::uint8_t *data, std::int64_t rows, std::int64_t first, std::int64_t last,
                Number *numbers) const {
        for (int shift = 0, width; shift < low_bits; shift += 32, data += (rows * width + 7) / 8) {
            width = std::min(32, low_bits - shift);
            for (std::int64_t row = first; row < last; ++row)
                numbers[row - first] |= static_cast<Number>(bits_at(data, row * width, width)) << shift;
        }
        const int bits = word_bits(group);
        const std::uint64_t reciprocal = radix > 1 ? ~std::uint64_t{0} / radix + 1 : 0;
        for (std::int64_t row = first, at = first / group * bits; row < last; row += group, at += bits) {
            const std::int64_t digits = std::min<std::int64_t>(group, rows - row);
            std::uint64_t word = bits_at(data, at, digits == group ? bits : word_bits(digits));
            for (std::int64_t i = 0; i < std::min(digits, last - row); ++i) {
                const auto rest = static_cast<std::uint64_t>(static_cast<Wide>(word) * reciprocal >> 64);
                numbers[row - first + i] |= static_cast<Number>(word - rest * radix) << low_bits;
                word = rest;
            }
        }
    }
    template <class Number> void pack(const Number *numbers, std::int64_t rows, std::vector<std::uint8_t> &out) const {
        for (int shift = 0; shift < low_bits; shift += 32) {
            BitWriter plane(out);
            const int width = std::min(32, low_bits - shift);
            for (std::int64_t row = 0; row < rows; ++row)
                plane.put(static_cast<std::uint64_t>(numbers[row] >> shift) & ((std::uint64_t{1} << width) - 1), width);
            plane.end();
        }
        BitWriter words(out);
        for (std::int64_t row = 0; row < rows; row += group) {
            const std::int64_t digits = std::min<std::int64_t>(group, rows - row);
            std::uint64_t word = 0;
            for (std::int64_t i = digits; i-- > 0;)
                word = word * radix + static_cast<std::uint64_t>(numbers[row + i] >> low_bits);
            words.put(word, word_bits(digits));
        }
        words.end();
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
    const IndexFields &fields() const { return fields_; }
    // The number of a row of K ascending ids.
    template <class Id> Number rank(const Id *ids) const {
        Number number = 0;
        for (int k = 0; k < top_k_; ++k)
            number += places_[k].choose(ids[k]);
        return number;
    }
    // Writes rows first .. last - 1 of a block of `rows` to `out` [last - first, K].
    template <class Id>
    bool decode(const std::uint8_t *data, std::int64_t rows, std::int64_t first, std::int64_t last, Id *out) const {
        const std::int64_t begin = first / fields_.group * fields_.group, count = last - first;
        std::vector<Number> words(last - begin);
        fields_.unpack(data, rows, begin, last, words.data());
        Number *const numbers = words.data() + (first - begin);
        if (std::any_of(numbers, numbers + count, [this](Number number) { return number >= total_; }))
            return false;
        // Place by place: the steps of different rows are independent, so the processor overlaps them.
        std::vector<std::uint16_t> members(count);
        for (int place = top_k_; place > tail_; --place) {
            places_[place - 1].take(numbers, count, members.data());
            for (std::int64_t row = 0; row < count; ++row)
                out[row * top_k_ + place - 1] = static_cast<Id>(members[row]);
        }
        for (std::int64_t row = 0; row < count; ++row)
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
} // namespace moe_rl
