-- attach: a stream moves to this gateway. Its worker is told, and sends there from its next step on.
-- ARGV   2 id  3 owner  4 gateway  5 ms after which the gateway counts as gone
-- reply  '' nobody knows it, or not this owner | {'ended', packed ending} | {state, attempt, place}
-- Repeat: safe. Cost O(log n).
local id, gateway = ARGV[2], ARGV[4]
local row = row_of(id)
if not row or row.owner ~= ARGV[3] then return '' end
if row.state == 'ended' then return { 'ended', cmsgpack.pack(row.ending) } end
call('ZADD', GATEWAYS, 'GT', now + tonumber(ARGV[5]), gateway)
move(id, row, gateway)
return { row.state, row.attempt, row.state == 'waiting' and place_of(id, row) or 0 }
