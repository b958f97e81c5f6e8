-- forgive: an attempt that was counted did not fail.
-- KEYS   1 times LIST of 'ms attempt'
-- ARGV   1 the attempt
-- reply  1 struck out | 0 it is not counted                        cost O(how many may fail)
-- Repeat: safe. It cannot be counted again: the attempt is over.
for _, one in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if string.match(one, ' (.*)$') == ARGV[1] then return redis.call('LREM', KEYS[1], 1, one) end
end
return 0
