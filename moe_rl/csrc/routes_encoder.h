// Encodes the sets of one layer into blocks (routes_codec.h says what a block is), and sorts and checks what is given.
//
// A layer's codes are learned from its own rows: in each group of experts, parts of sets that come at least three times
// get a code, of about log2(rows / count) bits. On gpt-oss's routes a layer uses a few thousand of the 35,960 sets of 4
// of 32 again and again, and a symbol takes 10.2 bits where the index takes 15.2.
#pragma once

#include "routes_codec.h"

namespace moe_rl {

// A layer's rows: K ascending ids each, `stride` ids apart.
template <class Id> struct LayerRows {
    const Id *ids;
    std::int64_t rows, stride;
    const Id *row(std::int64_t i) const { return ids + i * stride; }
};

struct CodedLayer {
    std::vector<std::uint8_t> book, blocks;
    std::vector<std::uint16_t> sizes;  // of every block
    std::vector<std::uint32_t> crcs;   // of every block, then of the codebook
};

// The parts of sets in one group of experts, each row's with a slot, and how often each slot comes.
class CountedParts {
  public:
    void count(const std::vector<std::uint64_t> &numbers, std::uint64_t total) {
        slot_of_row_.resize(numbers.size());
        counts_.clear(), numbers_.clear();
        if (total <= DIRECT) { // a slot is a number
            counts_.resize(total);
            for (std::size_t row = 0; row < numbers.size(); ++row)
                ++counts_[slot_of_row_[row] = static_cast<std::uint32_t>(numbers[row])];
            return;
        }
        const int bits = std::max(4, routes::width_of(static_cast<std::uint64_t>(numbers.size())) + 1);
        places_.assign(std::size_t{1} << bits, 0);
        for (std::size_t row = 0; row < numbers.size(); ++row) {
            std::size_t place = numbers[row] * 0x9E3779B97F4A7C15U >> (64 - bits);
            while (places_[place] && numbers_[places_[place] - 1] != numbers[row])
                place = (place + 1) & (places_.size() - 1);
            if (!places_[place]) {
                numbers_.push_back(numbers[row]), counts_.push_back(0);
                places_[place] = static_cast<std::uint32_t>(numbers_.size());
            }
            ++counts_[slot_of_row_[row] = places_[place] - 1];
        }
    }
    std::size_t num_slots() const { return counts_.size(); }
    std::uint64_t number(std::size_t slot) const { return numbers_.empty() ? slot : numbers_[slot]; }
    std::uint32_t count_of(std::size_t slot) const { return counts_[slot]; }
    std::uint32_t slot_of(std::size_t row) const { return slot_of_row_[row]; }

  private:
    static constexpr std::uint64_t DIRECT = 1 << 18;
    std::vector<std::uint32_t> slot_of_row_, counts_, places_;
    std::vector<std::uint64_t> numbers_;
};

class RouteEncoder {
  public:
    // With fewer rows a codebook costs more than its codes save.
    static constexpr std::int64_t MIN_ROWS_TO_LEARN = 4096;
    // A rarer set costs more in the codebook than its escapes do.
    static constexpr std::uint32_t MIN_COUNT = 3;
    // 2^13 codes of 14 bits fill half of Kraft's sum: likely sets can have shorter ones.
    static constexpr std::size_t MOST_CODES = 1 << (RouteCodes::BITS - 1);

    explicit RouteEncoder(const RouteShape &shape) : shape_(shape), group_of_(shape.experts), terms_(shape.top_k) {
        for (int expert = 0; expert < shape.experts; ++expert)
            group_of_[expert] = expert / shape.width;
        for (int place = 0; place < shape.top_k; ++place)
            for (int expert = 0; expert < shape.experts; ++expert) {
                const routes::Part &part = shape.parts[group_of_[expert]];
                const bool possible = place < static_cast<int>(part.places.size());
                terms_[place].push_back(possible ? part.places[place].choose(expert % shape.width) : 0);
            }
    }

    template <class Id> CodedLayer encode(const LayerRows<Id> &layer, std::int64_t block_rows) {
        CodedLayer coded;
        const bool learned = layer.rows >= MIN_ROWS_TO_LEARN && learn(layer);
        std::int64_t saved = 0;
        write(layer, block_rows, learned, saved, coded);
        if (learned && saved) {
            RouteCodes::write(groups_, coded.book);
            // A codebook may take more bytes than its codes save: then once more, without.
            if (saved <= static_cast<std::int64_t>(coded.book.size())) {
                coded = {};
                write(layer, block_rows, false, saved, coded);
            }
        }
        coded.crcs.push_back(Crc32::of(coded.book.data(), static_cast<std::int64_t>(coded.book.size())));
        return coded;
    }

  private:
    template <class Id> bool is_set(const Id *row) const {
        for (int k = 1; k < shape_.top_k; ++k)
            if (row[k] == row[k - 1])
                return false;
        return true;
    }

    // Learns codes from the rows that are sets; false if they take no fewer bits than the index.
    template <class Id> bool learn(const LayerRows<Id> &layer) {
        numbers_.assign(shape_.groups, {});
        set_of_row_.assign(layer.rows, 0);
        std::int64_t sets = 0;
        for (auto &numbers : numbers_)
            numbers.reserve(layer.rows);
        for (std::int64_t i = 0; i < layer.rows; ++i) {
            const Id *const row = layer.row(i);
            if (!is_set(row))
                continue;
            set_of_row_[i] = sets++;
            int k = 0;
            for (int group = 0; group < shape_.groups; ++group) {
                const routes::Part &part = shape_.parts[group];
                std::uint64_t number = 0;
                int size = 0;
                for (; k < shape_.top_k && group_of_[row[k]] == group; ++k)
                    number += terms_[size++][row[k]];
                numbers_[group].push_back(number + part.first[size - part.low]);
            }
        }
        counted_.resize(shape_.groups);
        groups_.assign(shape_.groups, {});
        codes_.assign(shape_.groups, {});
        std::int64_t bits = 0;
        for (int group = 0; group < shape_.groups; ++group) {
            counted_[group].count(numbers_[group], shape_.parts[group].first.back());
            bits += learn_group(group, sets);
        }
        return bits < sets * shape_.index_bits;
    }

    // Gives the parts of a group that come often their codes; returns the bits that all rows then take.
    std::int64_t learn_group(int group, std::int64_t sets) {
        const CountedParts &counted = counted_[group];
        std::vector<std::uint32_t> often;
        for (std::size_t slot = 0; slot < counted.num_slots(); ++slot)
            if (counted.count_of(slot) >= MIN_COUNT)
                often.push_back(static_cast<std::uint32_t>(slot));
        const auto by_number = [&](std::uint32_t a, std::uint32_t b) { return counted.number(a) < counted.number(b); };
        if (often.size() > MOST_CODES) {
            std::sort(often.begin(), often.end(), [&](std::uint32_t a, std::uint32_t b) {
                return counted.count_of(a) != counted.count_of(b) ? counted.count_of(a) > counted.count_of(b)
                                                                  : by_number(a, b);
            });
            often.resize(MOST_CODES);
        }
        std::sort(often.begin(), often.end(), by_number);
        std::int64_t rare = sets;
        std::vector<std::uint32_t> counts;
        for (const std::uint32_t slot : often)
            counts.push_back(counted.count_of(slot)), rare -= counted.count_of(slot);
        // Escaped sets pay for the escape code and their number.
        counts.push_back(static_cast<std::uint32_t>(std::max<std::int64_t>(1, rare)));
        RouteCodes::Group &codes = groups_[group];
        codes.lengths = lengths(counts);
        std::vector<std::uint16_t> symbol_of_slot(counted.num_slots(), static_cast<std::uint16_t>(often.size()));
        for (std::size_t symbol = 0; symbol < often.size(); ++symbol) {
            codes.numbers.push_back(counted.number(often[symbol]));
            symbol_of_slot[often[symbol]] = static_cast<std::uint16_t>(symbol);
        }
        const std::vector<std::uint16_t> words = RouteCodes::canonical(codes.lengths);
        codes_[group].resize(sets);
        for (std::int64_t set = 0; set < sets; ++set) {
            const std::uint16_t symbol = symbol_of_slot[counted.slot_of(set)];
            const bool is_escape = symbol == often.size();
            codes_[group][set] = {words[symbol], codes.lengths[symbol], is_escape};
        }
        std::int64_t bits = rare * shape_.parts[group].escape_bits;
        for (std::size_t symbol = 0; symbol < counts.size(); ++symbol)
            bits += std::int64_t{counts[symbol]} * codes.lengths[symbol];
        return bits;
    }

    // Code lengths near log2(total / count) that leave every code its own beginning (Kraft's sum at most 1).
    //
    // One factor f for all: a symbol has the smallest length l with count * 2^l * f >= total; f, in units of 2^-16, is
    // the largest between 1/4 and 2 that fits. Huffman's tree takes 0.01 bits less per symbol on recorded routes.
    static std::vector<std::uint8_t> lengths(const std::vector<std::uint32_t> &counts) {
        std::uint64_t total = 0;
        std::vector<std::uint32_t> distinct(counts);
        std::sort(distinct.begin(), distinct.end());
        for (const std::uint32_t count : counts)
            total += count;
        const auto length = [total](std::uint64_t count, std::uint64_t factor) {
            int bits = 1;
            while (bits < RouteCodes::BITS && (count * factor << bits) < total << 16)
                ++bits;
            return bits;
        };
        const auto fits = [&](std::uint64_t factor) {
            std::uint64_t used = 0;
            for (std::size_t i = 0, next; i < distinct.size(); i = next) {
                for (next = i; next < distinct.size() && distinct[next] == distinct[i];)
                    ++next;
                used += (next - i) << (RouteCodes::BITS - length(distinct[i], factor));
            }
            return used <= 1U << RouteCodes::BITS;
        };
        std::uint64_t low = 1 << 14, high = 1 << 17; // `low` fits: at most 2^13 symbols, and each length is 2 bits longer
        while (high - low > 1) {
            const std::uint64_t middle = (low + high) / 2;
            (fits(middle) ? low : high) = middle;
        }
        std::vector<std::uint8_t> result;
        for (const std::uint32_t count : counts)
            result.push_back(static_cast<std::uint8_t>(length(count, low)));
        return result;
    }

    template <class Id>
    void write(const LayerRows<Id> &layer, std::int64_t block_rows, bool learned, std::int64_t &saved,
               CodedLayer &coded) const {
        for (std::int64_t begin = 0; begin < layer.rows; begin += block_rows) {
            const std::int64_t end = std::min(layer.rows, begin + block_rows);
            const std::size_t start = coded.blocks.size();
            block(layer, begin, end, learned, saved, coded.blocks);
            const auto size = static_cast<std::int64_t>(coded.blocks.size() - start);
            coded.sizes.push_back(static_cast<std::uint16_t>(size));
            coded.crcs.push_back(Crc32::of(coded.blocks.data() + start, size));
        }
    }

    template <class Id>
    void block(const LayerRows<Id> &layer, std::int64_t begin, std::int64_t end, bool learned, std::int64_t &saved,
               std::vector<std::uint8_t> &out) const {
        bool constant = true, sets = true;
        for (std::int64_t i = begin; i < end; ++i) {
            constant = constant && !std::memcmp(layer.row(i), layer.row(begin), shape_.top_k * sizeof(Id));
            sets = sets && is_set(layer.row(i));
        }
        if (constant) {
            out.push_back(CONSTANT);
            plain(layer, begin, begin + 1, out);
            return;
        }
        const routes::IndexFields *const index = sets ? shape_.index() : nullptr;
        const std::int64_t otherwise =
            index ? index->num_bytes(end - begin) : (end - begin) * shape_.top_k * shape_.id_bytes();
        if (sets && learned && codes(begin, end, otherwise, saved, out))
            return;
        if (!index) {
            out.push_back(RAW);
            plain(layer, begin, end, out);
            return;
        }
        out.push_back(INDEX);
        const auto pack = [&](const auto &numbering, auto numbers) {
            for (std::int64_t i = begin; i < end; ++i)
                numbers.push_back(numbering.rank(layer.row(i)));
            index->pack(numbers.data(), end - begin, out);
        };
        if (shape_.narrow)
            pack(*shape_.narrow, std::vector<std::uint64_t>{});
        else
            pack(*shape_.wide, std::vector<routes::Wide>{});
    }

    template <class Id>
    void plain(const LayerRows<Id> &layer, std::int64_t begin, std::int64_t end, std::vector<std::uint8_t> &out) const {
        for (std::int64_t i = begin; i < end; ++i)
            for (int k = 0; k < shape_.top_k; ++k) {
                out.push_back(static_cast<std::uint8_t>(layer.row(i)[k]));
                if (shape_.id_bytes() == 2)
                    out.push_back(static_cast<std::uint8_t>(layer.row(i)[k] >> 8));
            }
    }

    // Appends a block of codes; appends nothing and returns false if that takes `limit` bytes or more.
    bool codes(std::int64_t begin, std::int64_t end, std::int64_t limit, std::int64_t &saved,
               std::vector<std::uint8_t> &out) const {
        const std::size_t start = out.size();
        const std::int64_t spans = (end - begin + SPAN_ROWS - 1) / SPAN_ROWS;
        out.push_back(CODES);
        out.resize(out.size() + 4 * spans);
        std::vector<std::uint8_t> escapes;
        routes::HighBitWriter code_bits(out);
        routes::BitWriter escape_bits(escapes);
        bool fits = true;
        for (std::int64_t span = 0; span < spans; ++span) {
            std::int64_t bits[2] = {0, 0};
            for (std::int64_t i = begin + span * SPAN_ROWS; i < std::min(end, begin + (span + 1) * SPAN_ROWS); ++i)
                for (int group = 0; group < shape_.groups; ++group) {
                    const std::int64_t set = set_of_row_[i];
                    const Code &code = codes_[group][set];
                    code_bits.put(code.bits, code.length);
                    bits[0] += code.length;
                    if (code.is_escape) {
                        escape_bits.put(numbers_[group][set], shape_.parts[group].escape_bits);
                        bits[1] += shape_.parts[group].escape_bits;
                    }
                }
            for (int stream = 0; stream < 2; ++stream) {
                fits = fits && bits[stream] < 1 << 16;
                out[start + 1 + 4 * span + 2 * stream] = static_cast<std::uint8_t>(bits[stream]);
                out[start + 2 + 4 * span + 2 * stream] = static_cast<std::uint8_t>(bits[stream] >> 8);
            }
        }
        code_bits.end(), escape_bits.end();
        out.insert(out.end(), escapes.begin(), escapes.end());
        const auto size = static_cast<std::int64_t>(out.size() - start - 1);
        if (!fits || size >= limit) {
            out.resize(start);
            return false;
        }
        saved += limit - size;
        return true;
    }

    const RouteShape &shape_;
    std::vector<int> group_of_;                      // [E]
    std::vector<std::vector<std::uint64_t>> terms_;  // [K][E] what an expert adds to its part's number at a place
    struct Code {
        std::uint16_t bits;
        std::uint8_t length;
        bool is_escape;
    };
    // Of the layer that is learned: by group, the numbers and codes of rows that are sets.
    std::vector<std::vector<std::uint64_t>> numbers_;
    std::vector<std::int64_t> set_of_row_;           // [rows] which set a row is, counted over rows that are sets
    std::vector<CountedParts> counted_;
    std::vector<std::vector<Code>> codes_;
    std::vector<RouteCodes::Group> groups_;
};

// What is wrong with routes that were to be sorted: the first [row, layer] in flat order, -1: none.
struct RouteFaults {
    std::int64_t outside = -1; // holds an id outside 0 .. E - 1
    std::int64_t twice = -1;   // names an expert twice; a row of zeros stands for a layer without routes
};

// Sorts K ids in place. For the usual K without a branch: which of two ids is the smaller cannot be predicted.
template <int K, class Id> void sort_row(Id *ids, int top_k) {
    if constexpr (K > 0) {
        for (int end = K - 1; end > 0; --end)
            for (int k = 0; k < end; ++k) {
                const Id low = std::min(ids[k], ids[k + 1]), high = std::max(ids[k], ids[k + 1]);
                ids[k] = low, ids[k + 1] = high;
            }
        return;
    }
    for (int k = 1; k < top_k; ++k)
        for (int place = k; place > 0 && ids[place - 1] > ids[place]; --place)
            std::swap(ids[place - 1], ids[place]);
}

template <int K, class Given, class Id>
RouteFaults sort_sets_of(const Given *ids, const bool *known, std::int64_t tokens, std::int64_t layers, int any_k,
                         int experts, Id *out) {
    RouteFaults faults;
    const int top_k = K ? K : any_k;
    std::int64_t row = 0;
    for (std::int64_t token = 0; token < tokens; ++token) {
        if (!known[token]) {
            std::fill_n(out, layers * top_k, Id{0});
            row += layers, ids += layers * top_k, out += layers * top_k;
            continue;
        }
        for (std::int64_t layer = 0; layer < layers; ++layer, ++row, ids += top_k, out += top_k) {
            Id sorted[routes::MAX_TOP_K];
            bool outside = false, twice = false;
            for (int k = 0; k < top_k; ++k) {
                outside |= static_cast<std::uint64_t>(static_cast<std::int64_t>(ids[k])) >= static_cast<std::uint64_t>(experts);
                sorted[k] = static_cast<Id>(ids[k]);
            }
            sort_row<K>(sorted, top_k);
            for (int k = 1; k < top_k; ++k)
                twice |= sorted[k] == sorted[k - 1];
            std::copy_n(sorted, top_k, out);
            if (outside && faults.outside < 0)
                faults.outside = row;
            if (twice && sorted[top_k - 1] > 0 && faults.twice < 0)
                faults.twice = row;
        }
    }
    return faults;
}

// Writes rows of K ids in ascending order. Rows that are not `known` [tokens] become zeros.
template <class Given, class Id>
RouteFaults sort_sets(const Given *ids, const bool *known, std::int64_t tokens, std::int64_t layers, int top_k,
                      int experts, Id *out) {
    if (top_k == 4)
        return sort_sets_of<4>(ids, known, tokens, layers, top_k, experts, out);
    if (top_k == 8)
        return sort_sets_of<8>(ids, known, tokens, layers, top_k, experts, out);
    return sort_sets_of<0>(ids, known, tokens, layers, top_k, experts, out);
}

} // namespace moe_rl
