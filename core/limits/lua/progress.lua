-- progress: what requests of one organisation have generated so far, and what each wants to hold. The worker's leash.
-- KEYS   1 stopped HASH   2 open ZSET   3.. per request: hold HASH, then per scope of it: counter HASH, money HASH
-- ARGV   per request: id, field of its key in `stopped`, names of its scopes, how many, input, cached, output so far
--        (input 0: not known yet), output tokens to hold, their pace as in reserve, output tokens to hold money for
-- reply  per request {1 open | 0 settled, allowance (-1: money does not bind), '' | 'revoked' | 'suspended', new debt}
-- A hold that nobody knows (the store lost it) is taken up again, without limits: what it has used is past.
-- Repeat: safe, only what is more than was charged is added. A scope of many of the requests is read and written once.
-- cost O(requests * scopes)
local NO_LIMIT = { requests = -1, tokens = -1, input = -1, output = -1, running = -1, day = -1, month = -1, prepaid = 0 }

local function take_up(at, arg)
  local plan = { weight = 1000, input = 0, price = { 0, 0, 0 }, scopes = {} }
  for i = 1, tonumber(ARGV[arg + 3]) do
    plan.scopes[i] = { limit = NO_LIMIT, lease = -1 }
    local c = load(KEYS[at + 2 * i - 1])
    c.running = c.running + 1
  end
  call('HSET', KEYS[at], 'state', 'open', 'scopes', ARGV[arg + 2], 'born', now, 'bin', 0, 'held_in', 0, 'held_out', 0,
    'pace', 0, 'left', 0, 'charged_in', tonumber(ARGV[arg + 4]), 'charged_out', tonumber(ARGV[arg + 6]), 'debt', 0, 'money', 0,
    'money_held', 0, 'allowance', -1, 'plan', cmsgpack.pack(plan))
  call('ZADD', KEYS[2], now, ARGV[arg])
  return hold_of(KEYS[at])
end

-- Money for what it may generate next. How far it may go.
local function pay(hold, scopes, uncached, cached, output, want)
  local price, bound, most = hold.plan.price, false, 2 ^ 53
  for _, one in ipairs(scopes) do
    if one.account then bound, most = true, math.min(most, available(one.account, one.limit)) end
  end
  if not bound then return -1 end
  local cost = math.max(hold.money, cost_of(price, uncached, cached, output))
  local wanted = cost_of(price, uncached, cached, output + want) - cost
  local left = hold.money_held - (cost - hold.money)
  -- What it was told it may have it keeps, since it may be generating just that; and whoever overdrew is lent no more.
  local held = math.max(0, left, math.min(wanted, left + most))
  for _, one in ipairs(scopes) do
    if one.account then
      spend(one.account, cost - hold.money, hold.born)
      one.account.held = math.max(0, one.account.held - hold.money_held + held)
    end
  end
  hold.money, hold.money_held = cost, held
  return output + covered(price, uncached, cached, output, cost + held)
end

local function report(at, arg)
  local hold, state = hold_of(KEYS[at])
  if state and not hold then return 0, -1, 0 end
  if not hold then hold = take_up(at, arg) end
  local input, cached, output = tonumber(ARGV[arg + 4]), tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])
  local scopes = scopes_of(hold.plan, at + 1)
  local room = charge(hold, scopes, input, cached, output, false)
  local left, pace, before = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8]), coming(hold.pace, hold.left)
  local more = math.min(firm_of(pace, left) - hold.held_out, math.max(0, room))
  hold.held_out = hold.held_out + more
  hold.pace, hold.left = pace, pace > 0 and left or hold.held_out
  local after = coming(hold.pace, hold.left)
  for _, one in ipairs(scopes) do
    one.counter.held_out = math.max(0, one.counter.held_out + more)
    expect(one.counter, before, after)
  end
  local uncached = input > 0 and input - cached or hold.plan.input
  local allowance = pay(hold, scopes, uncached, cached, output, tonumber(ARGV[arg + 9]))
  call('HSET', KEYS[at], 'held_in', hold.held_in, 'held_out', hold.held_out, 'pace', hold.pace, 'left', hold.left,
    'charged_in', hold.charged_in,
    'charged_out', hold.charged_out, 'money', hold.money, 'money_held', hold.money_held, 'allowance', allowance,
    'debt', hold.debt)
  return 1, allowance, hold.new_debt
end

local reply, stops, at = {}, { org = call('HGET', KEYS[1], 'org') }, 3
for arg = 1, #ARGV, 10 do
  local open, allowance, debt = report(at, arg)
  local field = ARGV[arg + 1]
  if stops[field] == nil then stops[field] = call('HGET', KEYS[1], field) end
  reply[#reply + 1] = { open, allowance, stops.org or stops[field] or '', debt }
  at = at + 1 + 2 * tonumber(ARGV[arg + 3])
end
for _, c in pairs(counters) do save(c) end
for _, a in pairs(accounts) do
  if a then keep_account(a) end
end
return reply
