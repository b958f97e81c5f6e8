-- settle: the request has ended. Charge what it used, give back what it held. Exactly once.
-- KEYS   1 hold HASH   2 open ZSET   3.. per scope: counter HASH, money HASH
-- ARGV   1 request id   2 3 4 input, cached, output tokens in all   5 '1': they are paid for, '0': they cost nothing
--        6 '1': it was refused after all, so it counts as no request   7 seconds to remember the hold, and 8 one that
--        money binds: until its usage was ingested (late.lua), however long Postgres is away
-- reply  1 settled | 0 settled before, or never held                          cost O(scopes), writes only on 1
-- Repeat: safe, `state` is the guard.   Mints nothing: tokens are only ever added. Money is given back, where what was
-- spent on the way is not paid for in the end.
local hold = hold_of(KEYS[1])
if not hold then return 0 end

-- The request of a bin is none. Where the bin has left the window, or the clock went back, it goes on counting.
local function forgo(c, bin)
  if bin < c.first or bin > newest then return end
  local requests, input, output = c.bin_requests, c.bin_input, c.bin_output
  local name = string.format('%.0f', bin)
  if bin < newest then requests, input, output = numbers(call('HGET', c.key, name)) end
  if requests == 0 then return end
  c.requests = c.requests - 1
  if bin == newest then c.bin_requests = requests - 1
  else call('HSET', c.key, name, written(requests - 1, input, output)) end
end

local input, cached, output = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local scopes = scopes_of(hold.plan, 3)
charge(hold, scopes, input, cached, output, true)
local before = coming(hold.pace, hold.left)
local remember_s = ARGV[7]
local cost = ARGV[5] == '1' and cost_of(hold.plan.price, input - cached, cached, output) or 0
for _, one in ipairs(scopes) do
  local c, a = one.counter, one.account
  c.running = math.max(0, c.running - 1)
  expect(c, before, NOTHING)
  if ARGV[6] == '1' then forgo(c, hold.bin) end
  save(c)
  if a then
    remember_s = ARGV[8]
    spend(a, cost - hold.money, hold.born)
    a.held = math.max(0, a.held - hold.money_held)
    keep_account(a)
  end
end
call('ZREM', KEYS[2], ARGV[1])
if remember_s == ARGV[7] then -- of what no money bound, a repeat need know no more than that it was settled
  call('DEL', KEYS[1])
  call('HSET', KEYS[1], 'state', 'settled', 'born', hold.born, 'debt', hold.debt)
else
  call('HSET', KEYS[1], 'state', 'settled', 'held_in', 0, 'held_out', 0, 'left', 0, 'charged_in', hold.charged_in,
    'charged_out', hold.charged_out, 'money', cost, 'money_held', 0, 'debt', hold.debt)
end
call('EXPIRE', KEYS[1], remember_s)
return 1
