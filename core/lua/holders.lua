-- holders: who holds these prefixes.
-- ARGV   hashes
-- reply  for each the workers, newest first, by ';'   cost O(hashes)         Repeat: safe, it only reads.
local reply = {}
if #ARGV == 0 then return reply end
for n, entry in ipairs(redis.call('HMGET', HOLDERS, unpack(ARGV))) do
  local _, names = holders_in(entry)
  reply[n] = table.concat(names, ';')
end
return reply
