// Decodes blocks of routes: sets of K of E experts per token and layer, up to 1024 tokens of one layer in a block.
// A header alone, so that a fuzzer needs no Python; nothing here trusts a byte of a block.
//
// A block is one byte that names its form, then
// - RAW: K ids per row; only if a row names an expert twice (which is no set), or sets have no index,
// - CONSTANT: K ids, the same in all rows (a dense layer, a row of padding),
// - INDEX: the numbers of the sets (IndexFields),
// - CODES: spans of 128 rows, so that a reader of few rows decodes few. For each span the bits of its codes and of its
//   escapes (2 x 16 bits), then the codes of all spans, then the escapes of all spans, each filled up to whole bytes.
//   A row has one code per group of experts (RouteCodes), its first bit highest in its byte; the number of the part that
//   an escape code stands for is an escape.
// Ids of a row ascend in every form: the order of a router's choices is not kept.
#pragma once

#include <array>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "routes_sets.h"

namespace moe_rl {

enum RouteForm : std::uint8_t { RAW, CONSTANT, INDEX, CODES };
constexpr std::int64_t SPAN_ROWS = 128;

// CRC-32 as zlib's, eight bytes at a time.
class Crc32 {
  public:
    static std::uint32_t of(const std::uint8_t *data, std::int64_t size) {
        static const Crc32 tables;
        const auto &t = tables.table_;
        std::uint32_t crc = ~std::uint32_t{0};
        for (; size >= 8; data += 8, size -= 8) {
            const std::uint64_t word = routes::load(data) ^ crc;
            crc = t[7][word & 255] ^ t[6][word >> 8 & 255] ^ t[5][word >> 16 & 255] ^ t[4][word >> 24 & 255] ^
                  t[3][word >> 32 & 255] ^ t[2][word >> 40 & 255] ^ t[1][word >> 48 & 255] ^ t[0][word >> 56];
        }
        for (; size > 0; ++data, --size)
            crc = t[0][(crc ^ *data) & 255] ^ crc >> 8;
        return ~crc;
    }

  private:
    Crc32() {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            std::uint32_t crc = byte;
            for (int bit = 0; bit < 8; ++bit)
                crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320U : 0);
            table_[0][byte] = crc;
        }
        for (int step = 1; step < 8; ++step)
            for (int byte = 0; byte < 256; ++byte)
                table_[step][byte] = table_[step - 1][byte] >> 8 ^ table_[0][table_[step - 1][byte] & 255];
    }
    std::array<std::array<std::uint32_t, 256>, 8> table_;
};

// The sets of K of E experts, cut into groups of at most 32 neighbouring experts: with 32 experts a group's part is the
// whole set.
struct RouteShape {
    static constexpr int GROUP_EXPERTS = 32;
    int experts, top_k, groups, width;
    std::vector<routes::Part> parts; // by group
    std::unique_ptr<routes::Sets<std::uint64_t>> narrow; // numbers of whole sets, if they have at most 52 bits
    std::unique_ptr<routes::Sets<routes::Wide>> wide;    // if they have more; neither: the sets have no index
    int index_bits;

    RouteShape(int num_experts, int k, routes::IndexFields fields, int bits)
        : experts(num_experts), top_k(k), groups((num_experts + GROUP_EXPERTS - 1) / GROUP_EXPERTS),
          width((num_experts + groups - 1) / groups), index_bits(bits) {
        if (fields.radix && bits <= 52)
            narrow = std::make_unique<routes::Sets<std::uint64_t>>(experts, top_k, fields);
        else if (fields.radix)
            wide = std::make_unique<routes::Sets<routes::Wide>>(experts, top_k, fields);
        for (int group = 0; group < groups; ++group) {
            const int items = std::min(width, experts - group * width);
            parts.emplace_back(items, groups == 1 ? top_k : 0, std::min(items, top_k));
        }
    }
    int id_bytes() const { return experts <= 256 ? 1 : 2; }
    const routes::IndexFields *index() const {
        return narrow ? &narrow->fields() : wide ? &wide->fields() : nullptr;
    }
};

// Short codes for the parts of sets that a layer takes often; one canonical prefix code per group of experts, of at most
// 14 bits. Parts that are rare are escaped.
//
// Canonical: as numbers of 14 bits, shorter codes are smaller, and codes of one length follow each other. So a code's
// length is how many lengths end below the next 14 bits (`limit`), and no table is looked up to know where the next
// code begins; records lie in the codes' order, those that come often first and in few cache lines. Example: lengths
// 1, 2, 2 of the symbols c, a, b give c 0, a 10, b 11: from 10... on, the length is 2, and the record the second.
//
// As bytes: for each group the number of codes n (16 bits) and the Rice parameter r of the steps between their parts'
// numbers (8 bits); then bits: for each group n steps less 1, each in ones as many as step >> r, a zero, and its low r
// bits (24 ones: 32 bits follow instead), then n + 1 lengths of 4 bits, the escape's last.
class RouteCodes {
  public:
    static constexpr int BITS = 14, MOST_ONES = 24, ESCAPED = 127;

    // What one group's code is.
    struct Group {
        std::vector<std::uint64_t> numbers; // ascending
        std::vector<std::uint8_t> lengths;  // of every code, the escape's last
    };

    // Codes of a layer as `bytes` say; `is_sound` tells whether they are.
    RouteCodes(const RouteShape &shape, const std::uint8_t *bytes, std::int64_t size)
        : record_words_((shape.top_k * shape.id_bytes() + 7) / 8) {
        std::vector<Group> groups;
        sound_ = read(shape, bytes, size, groups);
        if (sound_)
            fill(shape, groups);
    }
    bool is_sound() const { return sound_; }
    std::int64_t num_bytes() const {
        return static_cast<std::int64_t>(sizeof(Table) * tables_.size() + sizes_.size() + 8 * records_.size());
    }

    // What the decoder looks up of one group.
    struct Table {
        alignas(16) std::int16_t limit[16]; // of length 1, 2, ...: where longer codes begin, of 14 bits
        std::int32_t place[16];             // what (14 bits >> (14 - length)) lacks to the symbol's place
        std::size_t first;                  // place of the group's first symbol

        // The length of the code that the 14 bits begin with; more than 14: none.
        int length(std::uint32_t bits) const {
#if defined(__SSE2__)
            const __m128i wanted = _mm_set1_epi16(static_cast<std::int16_t>(bits));
            const auto *const of = reinterpret_cast<const __m128i *>(limit);
            const __m128i longer = _mm_packs_epi16(_mm_cmpgt_epi16(_mm_load_si128(of), wanted),
                                                   _mm_cmpgt_epi16(_mm_load_si128(of + 1), wanted));
            return 1 + std::countr_zero(static_cast<std::uint32_t>(_mm_movemask_epi8(longer)));
#else
            int result = 1;
            for (int i = 0; i < BITS; ++i)
                result += static_cast<int>(bits) >= limit[i];
            return result;
#endif
        }
    };
    const Table &table(int group) const { return tables_[group]; }
    // Members of the part at a place; ESCAPED: the escape.
    int size(std::size_t place) const { return sizes_[place]; }
    // Its members as ids, filled up with zeros to whole words.
    const std::uint64_t *record(std::size_t place) const { return records_.data() + place * record_words_; }
    int record_words() const { return record_words_; }

    // The code of every symbol of a group, in its lowest bits.
    static std::vector<std::uint16_t> canonical(const std::vector<std::uint8_t> &lengths) {
        std::vector<std::uint16_t> codes(lengths.size());
        std::uint32_t start = 0;
        for (int length = 1; length <= BITS; ++length)
            for (std::size_t symbol = 0; symbol < lengths.size(); ++symbol)
                if (lengths[symbol] == length) {
                    codes[symbol] = static_cast<std::uint16_t>(start >> (BITS - length));
                    start += 1U << (BITS - length);
                }
        return codes;
    }

    static void write(const std::vector<Group> &groups, std::vector<std::uint8_t> &out) {
        std::vector<int> rice;
        for (const Group &group : groups) {
            const std::uint64_t mean = group.numbers.empty() ? 0 : group.numbers.back() / group.numbers.size();
            rice.push_back(std::max(0, routes::width_of(mean) - 1));
            out.push_back(static_cast<std::uint8_t>(group.numbers.size()));
            out.push_back(static_cast<std::uint8_t>(group.numbers.size() >> 8));
            out.push_back(static_cast<std::uint8_t>(rice.back()));
        }
        routes::BitWriter bits(out);
        for (std::size_t place = 0; place < groups.size(); ++place) {
            std::uint64_t next = 0;
            for (const std::uint64_t number : groups[place].numbers) {
                const std::uint64_t step = number - next, ones = step >> rice[place];
                next = number + 1;
                if (ones < MOST_ONES) {
                    bits.put((std::uint64_t{1} << ones) - 1, static_cast<int>(ones) + 1);
                    bits.put(step & ((std::uint64_t{1} << rice[place]) - 1), rice[place]);
                } else {
                    bits.put((std::uint64_t{1} << MOST_ONES) - 1, MOST_ONES);
                    bits.put(step, 32);
                }
            }
            for (const std::uint8_t length : groups[place].lengths)
                bits.put(length, 4);
        }
        bits.end();
    }

  private:
    static bool read(const RouteShape &shape, const std::uint8_t *bytes, std::int64_t size, std::vector<Group> &groups) {
        const std::int64_t head = 3 * std::int64_t{shape.groups};
        if (size < head)
            return false;
        std::vector<std::uint8_t> body(bytes, bytes + size);
        body.resize(size + routes::PAD);
        std::int64_t at = 8 * head;
        const std::int64_t end = 8 * size;
        for (int group = 0; group < shape.groups; ++group) {
            const int count = body[3 * group] | body[3 * group + 1] << 8, rice = body[3 * group + 2];
            if (count > 1 << (BITS - 1) || rice > 32)
                return false;
            Group codes;
            std::uint64_t next = 0;
            for (int symbol = 0; symbol < count; ++symbol) {
                if (at > end)
                    return false;
                const int ones = std::countr_one(routes::bits_at(body.data(), at, MOST_ONES));
                const int width = ones < MOST_ONES ? rice : 32;
                at += ones < MOST_ONES ? ones + 1 : MOST_ONES;
                if (at + width > end)
                    return false;
                const std::uint64_t low = routes::bits_at(body.data(), at, width);
                at += width;
                const std::uint64_t number = next + (ones < MOST_ONES ? (std::uint64_t(ones) << rice) + low : low);
                if (number >= shape.parts[group].first.back())
                    return false;
                codes.numbers.push_back(number);
                next = number + 1;
            }
            std::uint32_t used = 0;
            for (int symbol = 0; symbol <= count; ++symbol, at += 4) {
                if (at + 4 > end)
                    return false;
                const auto length = static_cast<std::uint8_t>(routes::bits_at(body.data(), at, 4));
                if (length < 1 || length > BITS)
                    return false;
                used += 1U << (BITS - length);
                codes.lengths.push_back(length);
            }
            if (used > 1U << BITS)
                return false;
            groups.push_back(std::move(codes));
        }
        return (at + 7) / 8 == size;
    }

    void fill(const RouteShape &shape, const std::vector<Group> &groups) {
        for (int group = 0; group < shape.groups; ++group) {
            const Group &codes = groups[group];
            Table table;
            std::fill_n(table.limit, 16, std::int16_t{32767});
            std::fill_n(table.place, 16, 0);
            table.first = sizes_.size();
            std::int32_t start = 0, place = 0;
            for (int length = 1; length <= BITS; ++length) {
                table.place[length] = place - (start >> (BITS - length));
                for (std::size_t symbol = 0; symbol < codes.lengths.size(); ++symbol)
                    if (codes.lengths[symbol] == length) {
                        add(shape, group, symbol < codes.numbers.size() ? &codes.numbers[symbol] : nullptr);
                        start += 1 << (BITS - length), ++place;
                    }
                table.limit[length - 1] = static_cast<std::int16_t>(start);
            }
            tables_.push_back(table);
        }
    }
    // Appends the record of a part, or of the escape.
    void add(const RouteShape &shape, int group, const std::uint64_t *number) {
        records_.resize(records_.size() + record_words_);
        std::uint64_t *const words = records_.data() + records_.size() - record_words_;
        const routes::Part &part = shape.parts[group];
        int size = ESCAPED;
        if (number && shape.id_bytes() == 1)
            size = part.unrank(*number, shape.top_k, group * shape.width, reinterpret_cast<std::uint8_t *>(words));
        else if (number)
            size = part.unrank(*number, shape.top_k, group * shape.width, reinterpret_cast<std::uint16_t *>(words));
        sizes_.push_back(static_cast<std::uint8_t>(size));
    }

    bool sound_ = false;
    int record_words_;
    std::vector<Table> tables_;          // [groups]
    std::vector<std::uint8_t> sizes_;    // by place, of all groups
    std::vector<std::uint64_t> records_; // [places, record_words]
};

// Rows first .. last - 1 of a block of `rows`, written to `out`, `stride` ids apart.
template <class Id> struct BlockRows {
    const std::uint8_t *data;
    std::int64_t size, rows, first, last;
    Id *out;
    std::int64_t stride;
};

class RouteDecoder {
  public:
    explicit RouteDecoder(const RouteShape &shape) : shape_(shape) {}

    // Returns false if the bytes are not a block of so many rows. `scratch` is kept from call to call.
    template <class Id>
    bool decode(const BlockRows<Id> &block, const RouteCodes *codes, std::vector<std::uint8_t> &scratch) const {
        if (block.size < 1)
            return false;
        const std::int64_t bytes = block.size - 1;
        scratch.resize(bytes + routes::PAD);
        std::memcpy(scratch.data(), block.data + 1, bytes);
        std::fill_n(scratch.data() + bytes, routes::PAD, std::uint8_t{0});
        switch (block.data[0]) {
        case CODES:
            return codes && this->codes(block, scratch.data(), bytes, *codes);
        case INDEX: {
            if (!shape_.index() || bytes != shape_.index()->num_bytes(block.rows))
                return false;
            std::vector<Id> ids((block.last - block.first) * shape_.top_k);
            const bool sound =
                shape_.narrow ? shape_.narrow->decode(scratch.data(), block.rows, block.first, block.last, ids.data())
                              : shape_.wide->decode(scratch.data(), block.rows, block.first, block.last, ids.data());
            for (std::int64_t row = 0; sound && row < block.last - block.first; ++row)
                std::memcpy(block.out + row * block.stride, &ids[row * shape_.top_k], shape_.top_k * sizeof(Id));
            return sound;
        }
        case RAW:
        case CONSTANT:
            return this->plain(block, scratch.data(), bytes);
        default:
            return false;
        }
    }

  private:
    template <class Id>
    bool plain(const BlockRows<Id> &block, const std::uint8_t *data, std::int64_t bytes) const {
        const bool raw = block.data[0] == RAW;
        const int top_k = shape_.top_k, id_bytes = shape_.id_bytes();
        if (bytes != (raw ? block.rows : 1) * top_k * id_bytes)
            return false;
        for (std::int64_t row = block.first; row < block.last; ++row) {
            const std::uint8_t *const ids = data + (raw ? row * top_k * id_bytes : 0);
            Id *const out = block.out + (row - block.first) * block.stride;
            for (int k = 0; k < top_k; ++k) {
                const int id = id_bytes == 1 ? ids[k] : ids[2 * k] | ids[2 * k + 1] << 8;
                if (id >= shape_.experts || (k && id < out[k - 1]))
                    return false;
                out[k] = static_cast<Id>(id);
            }
        }
        return true;
    }

    // A span that is being decoded. Several are decoded side by side: where a code begins is known only when the one
    // before it is, so that one span alone waits for its table.
    template <class Id> struct Lane {
        std::int64_t at, end, escaped, escapes_end; // bits
        std::int64_t skipped;                       // rows before the first one that is wanted
        std::int64_t rows;                          // still to decode
        bool whole;                                 // to its end
        Id *out;
    };

    template <class Id>
    bool codes(const BlockRows<Id> &block, const std::uint8_t *data, std::int64_t size, const RouteCodes &codes) const {
        const std::int64_t spans = (block.rows + SPAN_ROWS - 1) / SPAN_ROWS;
        if (size < 4 * spans)
            return false;
        std::vector<Lane<Id>> lanes;
        std::int64_t code = 0, escape = 0;
        for (std::int64_t span = 0; span < spans; ++span) {
            std::uint16_t bits[2];
            std::memcpy(bits, data + 4 * span, 4);
            const std::int64_t begin = span * SPAN_ROWS, end = std::min(block.rows, begin + SPAN_ROWS);
            const std::int64_t low = std::max(block.first, begin), high = std::min(block.last, end);
            if (low < high)
                lanes.push_back({code, code + bits[0], escape, escape + bits[1], low - begin, high - begin, high == end,
                                 block.out + (low - block.first) * block.stride});
            code += bits[0], escape += bits[1];
        }
        const std::uint8_t *const code_bytes = data + 4 * spans, *const escape_bytes = code_bytes + (code + 7) / 8;
        if (size != 4 * spans + (code + 7) / 8 + (escape + 7) / 8)
            return false;
        for (std::size_t begin = 0; begin < lanes.size(); begin += 4)
            if (!together(lanes.data() + begin, std::min<std::size_t>(4, lanes.size() - begin), code_bytes, escape_bytes,
                          codes, block.stride))
                return false;
        return true;
    }

    template <class Id>
    bool together(Lane<Id> *lanes, std::size_t count, const std::uint8_t *code_bytes, const std::uint8_t *escape_bytes,
                  const RouteCodes &codes, std::int64_t stride) const {
        const auto run = [&]<int K>() {
            std::size_t left = count;
            while (left) {
                std::int64_t rows = lanes[0].rows;
                for (std::size_t i = 1; i < left; ++i)
                    rows = std::min(rows, lanes[i].rows);
                const bool sound = left == 4   ? rows_of<K, 4>(lanes, rows, code_bytes, escape_bytes, codes, stride)
                                   : left == 3 ? rows_of<K, 3>(lanes, rows, code_bytes, escape_bytes, codes, stride)
                                   : left == 2 ? rows_of<K, 2>(lanes, rows, code_bytes, escape_bytes, codes, stride)
                                               : rows_of<K, 1>(lanes, rows, code_bytes, escape_bytes, codes, stride);
                if (!sound)
                    return false;
                for (std::size_t i = 0; i < left;)
                    if (lanes[i].rows)
                        ++i;
                    else if (lanes[i].whole && (lanes[i].at != lanes[i].end || lanes[i].escaped != lanes[i].escapes_end))
                        return false;
                    else
                        lanes[i] = lanes[--left];
            }
            return true;
        };
        if (shape_.top_k == 4)
            return run.template operator()<4>();
        if (shape_.top_k == 8)
            return run.template operator()<8>();
        return run.template operator()<0>();
    }

    template <int K, int LANES, class Id>
    bool rows_of(Lane<Id> *lanes, std::int64_t rows, const std::uint8_t *code_bytes, const std::uint8_t *escape_bytes,
                 const RouteCodes &codes, std::int64_t stride) const {
        Lane<Id> local[LANES];
        std::copy_n(lanes, LANES, local);
        for (std::int64_t row = 0; row < rows; ++row)
            for (int i = 0; i < LANES; ++i)
                if (!next<K>(local[i], code_bytes, escape_bytes, codes, stride))
                    return false;
        for (int i = 0; i < LANES; ++i)
            local[i].rows -= rows;
        std::copy_n(local, LANES, lanes);
        return true;
    }

    // Decodes one row: K members, a part per group of experts. K = 0: any.
    template <int K, class Id>
    bool next(Lane<Id> &lane, const std::uint8_t *code_bytes, const std::uint8_t *escape_bytes, const RouteCodes &codes,
              std::int64_t stride) const {
        const int top_k = K ? K : shape_.top_k;
        // A record fills whole words behind the members before it: how many of them are members cannot be predicted.
        alignas(16) Id ids[2 * routes::MAX_TOP_K + 8];
        int filled = 0;
        for (int group = 0; group < shape_.groups; ++group) {
            if (lane.at >= lane.end)
                return false;
            const RouteCodes::Table &table = codes.table(group);
            const std::uint32_t bits = routes::first_bits_at(code_bytes, lane.at, RouteCodes::BITS);
            const int length = table.length(bits);
            if (length > RouteCodes::BITS)
                return false;
            lane.at += length;
            const std::size_t place = table.first + table.place[length] + (bits >> (RouteCodes::BITS - length));
            int size = codes.size(place);
            if (size == RouteCodes::ESCAPED) {
                const routes::Part &part = shape_.parts[group];
                if (lane.escaped + part.escape_bits > lane.escapes_end)
                    return false;
                size = part.unrank(routes::bits_at(escape_bytes, lane.escaped, part.escape_bits), top_k - filled,
                                   group * shape_.width, ids + filled);
                lane.escaped += part.escape_bits;
            } else if constexpr (K * sizeof(Id) > 0 && K * sizeof(Id) <= 8) {
                std::memcpy(ids + filled, codes.record(place), 8);
            } else {
                std::memcpy(ids + filled, codes.record(place), 8 * codes.record_words());
            }
            if (size < 0 || size > top_k - filled)
                return false;
            filled += size;
        }
        if (filled != top_k)
            return false;
        if (lane.skipped) {
            --lane.skipped;
        } else {
            std::memcpy(lane.out, ids, top_k * sizeof(Id));
            lane.out += stride;
        }
        return true;
    }

    const RouteShape &shape_;
};

} // namespace moe_rl
