-- reserve: open a hold, in every scope or in none.
-- KEYS   1 hold HASH   2 open ZSET   3 stopped HASH   4.. per scope: counter HASH, money HASH
-- ARGV   1 request id   2 field of its key in `stopped`   3 model   4 names of the scopes   5 input tokens
--        6 output tokens to hold   7 the least of them that will do   8 weight of cached input, thousandths
--        9 10 11 price of a million tokens of input, cached input, output   12 pace of output, thousandths of a token a
--        second (0: all at once)   13.. per scope: requests, tokens, input, output in 60 s, concurrent requests, money a
--        day, a month (-1: no limit), prepaid (1, 0)
-- reply  {1, allowance: output tokens that money covers (-1: it does not bind), LEFT}
--        | {0, reason, scope (1..; 0: none), retry after ms (-1: no telling), LEFT}
--          reason: 'revoked' 'suspended' 'unleased' (money of the scope is not known: open its lease, ask again)
--          'too_large' (for ever) 'concurrency' 'requests' 'tokens' 'input_tokens' 'output_tokens' 'balance' 'day' 'month'
--        LEFT, per scope: requests, tokens, input, output (-1: no limit), ms until all is free
-- hold   state, model, scopes, born ms, bin it was counted in, held_in, held_out: what is firm; pace, left: what else it
--        may come to; charged_in, charged_out, debt, money, money_held, plan: msgpack {weight, input, price, per scope {limits, lease}}
-- Repeat: safe, `state` is the guard. A refusal writes nothing, but for counters that it finds in the future: the clock
-- went back, and told again of each call they would never leave.                                  cost O(scopes)
local id, need_in, need_out, least_out = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local pace = tonumber(ARGV[12])
local price = { tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]) }
local scopes = {}
for at = 4, #KEYS, 2 do
  local arg = 13 + 4 * (at - 4)
  local limit = { requests = tonumber(ARGV[arg]), tokens = tonumber(ARGV[arg + 1]), input = tonumber(ARGV[arg + 2]),
    output = tonumber(ARGV[arg + 3]), running = tonumber(ARGV[arg + 4]), day = tonumber(ARGV[arg + 5]),
    month = tonumber(ARGV[arg + 6]), prepaid = tonumber(ARGV[arg + 7]) }
  scopes[#scopes + 1] = { limit = limit, counter = load(KEYS[at]), money = KEYS[at + 1] }
end
local known = call('HMGET', KEYS[1], 'state', 'allowance')

local function told(...)
  local reply = { ... }
  for _, one in ipairs(scopes) do
    tell(reply, one.counter, one.limit)
    if one.counter.moved then save(one.counter) end
  end
  return reply
end

if known[1] then return told(1, tonumber(known[2] or -1)) end -- late.lua remembers holds that it never saw
local stops = call('HMGET', KEYS[3], 'org', ARGV[2])
if stops[1] or stops[2] then return told(0, stops[1] or stops[2], 0, -1) end

-- What no waiting helps with. In the window it can come to no more than its pace lets it.
local left = need_out
need_out = coming(pace, left)[STEPS]
local most_out = need_out
for i, one in ipairs(scopes) do
  local limit = one.limit
  if limit.tokens >= 0 then need_out = math.min(need_out, math.max(least_out, limit.tokens - need_in)) end
  if limit.output >= 0 then need_out = math.min(need_out, math.max(least_out, limit.output)) end
  if pays(limit) then
    one.account = account(one.money)
    if not one.account then return told(0, 'unleased', i, -1) end
  end
end
for i, one in ipairs(scopes) do
  local limit = one.limit
  if (limit.tokens >= 0 and need_in + need_out > limit.tokens) or (limit.input >= 0 and need_in > limit.input)
    or (limit.output >= 0 and need_out > limit.output) then
    return told(0, 'too_large', i, -1)
  end
end

if need_out < most_out then left = need_out end
local firm, ahead = firm_of(pace, left), coming(pace, left)

-- Of all that stands in the way, what does so longest.
local why, where, wait_ms
local function stand(i, reason, ms)
  if not why or (wait_ms >= 0 and (ms < 0 or ms > wait_ms)) then why, where, wait_ms = reason, i, ms end
end

local function stand_for(i, reason, ms)
  if ms ~= 0 then stand(i, reason, ms) end
end

local function stand_rates(i, c, limit)
  if limit.running >= 0 and c.running >= limit.running then stand(i, 'concurrency', -1) end
  if limit.requests >= 0 and c.requests + 1 > limit.requests then
    stand(i, 'requests', frees_ms(c, function(requests) return requests + 1 <= limit.requests end))
  end
  if limit.tokens >= 0 then
    local rooms = rooms_of(c, limit.tokens - c.held_in - need_in, firm, ahead)
    stand_for(i, 'tokens', fits_ms(c, c.input + c.output, function(input, output) return input + output end, rooms))
  end
  local room_in = limit.input - c.held_in - need_in
  if limit.input >= 0 and c.input > room_in then
    stand(i, 'input_tokens', frees_ms(c, function(_, input) return input <= room_in end))
  end
  if limit.output >= 0 then
    local rooms = rooms_of(c, limit.output, firm, ahead)
    stand_for(i, 'output_tokens', fits_ms(c, c.output, function(_, output) return output end, rooms))
  end
end

-- Money: enough for the prompt and a token of answer.
local function stand_money(i, a, limit)
  local cost = cost_of(price, need_in, 0, math.min(1, need_out))
  local balance, day, month = purses(a, limit)
  if cost > balance then stand(i, 'balance', -1) end
  if cost > day then stand(i, 'day', cost + a.held <= limit.day and day_ends_ms(a) or -1) end
  if cost > month then stand(i, 'month', cost + a.held <= limit.month and month_ends_ms(a) or -1) end
end

-- What is held of it is what the request may come to in the window.
local money, money_held, allowance = 2 ^ 53, 0, -1
for i, one in ipairs(scopes) do
  stand_rates(i, one.counter, one.limit)
  if one.account then
    stand_money(i, one.account, one.limit)
    money, allowance = math.min(money, available(one.account, one.limit)), 0
  end
end
if why then return told(0, why, where, wait_ms) end
if allowance >= 0 then
  money_held = math.min(money, cost_of(price, need_in, 0, need_out))
  allowance = covered(price, need_in, 0, 0, money_held)
end

local plan = { weight = tonumber(ARGV[8]), input = need_in, price = price, scopes = {} }
for i, one in ipairs(scopes) do
  local c, a = one.counter, one.account
  c.running, c.held_in, c.held_out = c.running + 1, c.held_in + need_in, c.held_out + firm
  expect(c, NOTHING, ahead)
  add(c, 1, 0, 0)
  save(c)
  if a then
    a.held = a.held + money_held
    keep_account(a)
  end
  plan.scopes[i] = { limit = one.limit, lease = a and a.lease or -1 }
end
call('HSET', KEYS[1], 'state', 'open', 'model', ARGV[3], 'scopes', ARGV[4], 'born', now, 'bin', newest,
  'held_in', need_in, 'held_out', firm, 'pace', pace, 'left', left, 'charged_in', 0, 'charged_out', 0, 'debt', 0, 'money', 0,
  'money_held', money_held, 'allowance', allowance, 'plan', cmsgpack.pack(plan))
call('ZADD', KEYS[2], now, id)
return told(1, allowance)
