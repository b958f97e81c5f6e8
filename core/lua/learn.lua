-- learn: one more answer came to this length. Two sketches learn it: its key's, and its model's.
-- KEYS   1 the key's sketch STRING   2 the model's
-- ARGV   1 bin, from 0   2 bins in all   3 TTL ms   4.. most answers of each sketch: reaching it halves its counts
-- reply  1                                   cost O(bins)      Repeat: counts once more, which is harmless.
for i, key in ipairs(KEYS) do
  local packed = redis.call('GET', key)
  local counts = packed and cmsgpack.unpack(packed) or {}
  for bin = #counts + 1, tonumber(ARGV[2]) do counts[bin] = 0 end
  local bin, total = tonumber(ARGV[1]) + 1, 0
  counts[bin] = counts[bin] + 1
  for _, count in ipairs(counts) do total = total + count end
  if total >= tonumber(ARGV[3 + i]) then
    for at, count in ipairs(counts) do counts[at] = math.floor(count / 2) end
  end
  redis.call('SET', key, cmsgpack.pack(counts), 'PX', ARGV[3])
end
return 1
