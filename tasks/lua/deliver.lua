-- deliver: a worker is about to publish the first tokens of these attempts. Pipelined before that publish, and after it
-- has saved whatever earlier attempts had delivered (core/stream/log.py).
-- ARGV   2 worker  3.. pairs id, attempt
-- reply  one of 1 (go on) | 0 (fenced) for each                                 cost O(pairs)
-- Repeat: safe. Once part of a sampled answer has reached its client, no other worker may sample it anew.
local reply = {}
for i = 3, #ARGV, 2 do
  local row = row_of(ARGV[i])
  local ours = row and row.state == 'running' and row.worker == ARGV[2] and row.attempt == tonumber(ARGV[i + 1])
  if ours and row.first_ms == 0 then
    row.first_ms, row.shown, row.trail = now, true, ''
    keep(ARGV[i], row)
  end
  reply[#reply + 1] = ours and 1 or 0
end
return reply
