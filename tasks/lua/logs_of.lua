-- logs_of: where to look for what was delivered of a request and is not saved yet (core/stream/log.py).
-- ARGV   2 id
-- reply  workers whose logs may hold it, in order: at most who had it last and who has it; none: all of it is saved
-- Repeat: safe, reads only. Cost O(1).
local row = row_of(ARGV[2])
if not row then return {} end
if row.state == 'ended' then -- its worker saved all before it said so; who was lost said nothing, and may have had some
  local answered = row.ending.outcome == 'completed' or row.ending.outcome == 'length'
  local had = row.worker ~= '' and row.worker or row.trail
  return (answered or had == '') and {} or { had }
end
local logs = {}
if row.trail ~= '' then logs[1] = row.trail end
if row.worker ~= '' then logs[#logs + 1] = row.worker end
return logs
