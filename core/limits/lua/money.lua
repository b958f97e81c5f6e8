-- money: the accounts of scopes that money binds, after window. Amounts are integers of 1e-10 of the currency; a price is
-- so many of them for a million tokens.
local MILLION, DAY_MS = 1000000, 86400000
-- What an account was ever granted and has ever spent is told in whole ones of the currency and units beside them; a
-- balance counts for BALANCE_MAX at most. MOST is exact, and more than any budget.
local WHOLE, BALANCE_MAX, MOST = 10000000000, 900000, 2 ^ 53 - 1

-- Exact, and rounded up once: a product of tokens and price may be too large for a double, so it is made in two parts.
local function cost_of(price, uncached, cached, output)
  local whole, rest = 0, 0
  for i, tokens in ipairs({ uncached, cached, output }) do
    local high = math.floor(price[i] / MILLION)
    whole, rest = whole + tokens * high, rest + tokens * (price[i] - high * MILLION)
  end
  return whole + math.ceil(rest / MILLION)
end

-- How many tokens of output, after `output`, so many units cover in all; at most 2^31. Estimated, then made exact: the
-- cost is rounded up to units, and a unit pays for more than one token where a million cost less than a million units.
local function covered(price, uncached, cached, output, units)
  local left = units - cost_of(price, uncached, cached, output)
  if left < 0 then return 0 end
  if price[3] == 0 then return 2 ^ 31 end
  local likely, slack = math.floor(math.min(left / price[3] * MILLION, 2 ^ 31)), math.ceil(MILLION / price[3]) + 1
  local low, high = math.max(0, likely - slack), math.min(2 ^ 31, likely + slack)
  while low < high do
    local n = math.ceil((low + high) / 2)
    if cost_of(price, uncached, cached, output + n) <= units then low = n else high = n - 1 end
  end
  return low
end

-- The month of a day, both counted on: years * 12 + months, from a day since the epoch (Hinnant, days_to_civil).
local function month_of(day)
  local z = day + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local mp = math.floor((5 * (doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))) + 2) / 153)
  return (yoe + era * 400) * 12 + (mp < 10 and mp + 2 or mp - 10) + (mp < 10 and 0 or 12)
end

local today = math.floor(now / DAY_MS)

-- Accounts that this call has read; false: no lease.
local accounts = {}

-- An account as it is now, or nil: no lease.
local function account(key)
  local a = accounts[key]
  if a ~= nil then return a or nil end
  local raw = call('HMGET', key, 'lease', 'granted', 'spent', 'held', 'day', 'day_spent', 'month', 'month_spent',
    'granted_whole', 'spent_whole')
  accounts[key] = false
  if not raw[1] then return nil end
  a = { key = key, lease = tonumber(raw[1]), granted = tonumber(raw[2]), spent = tonumber(raw[3]),
    held = tonumber(raw[4]), day = tonumber(raw[5]), day_spent = tonumber(raw[6]), month = tonumber(raw[7]),
    month_spent = tonumber(raw[8]), granted_whole = tonumber(raw[9] or 0), spent_whole = tonumber(raw[10] or 0) }
  if a.day < today then a.day, a.day_spent = today, 0 end
  local this_month = month_of(today)
  if a.month < this_month then a.month, a.month_spent = this_month, 0 end
  accounts[key] = a
  return a
end

local function keep_account(a)
  call('HSET', a.key, 'spent', a.spent, 'spent_whole', a.spent_whole, 'held', a.held, 'day', a.day, 'day_spent',
    a.day_spent, 'month', a.month, 'month_spent', a.month_spent)
end

local function balance_of(a)
  local whole = math.max(0 - BALANCE_MAX, math.min(BALANCE_MAX, a.granted_whole - a.spent_whole))
  return whole * WHOLE + a.granted - a.spent
end

-- What may still be spent of the balance, today, and this month; huge where nothing binds it.
local function purses(a, limit)
  return limit.prepaid == 1 and balance_of(a) - a.held or 2 ^ 53,
    limit.day >= 0 and limit.day - a.day_spent - a.held or 2 ^ 53,
    limit.month >= 0 and limit.month - a.month_spent - a.held or 2 ^ 53
end

local function available(a, limit) return math.min(purses(a, limit)) end

-- How long until the account's day has passed, and its month.
local function day_ends_ms(a) return (a.day + 1) * DAY_MS - now end
local function month_ends_ms(a)
  local day = a.day
  while month_of(day) <= a.month do day = day + 1 end
  return day * DAY_MS - now
end

-- What was spent in a day or a month. Once it is MOST it stays so until that ends: nobody knows how much more it was.
local function more(spent, units)
  if spent >= MOST then return MOST end
  return math.min(MOST, math.max(0, spent + units))
end

-- Spend. What is given back (less than 0) is not given to a day or a month that began after it was spent.
local function spend(a, units, born_ms)
  local whole = math.floor(units / WHOLE)
  a.spent, a.spent_whole = a.spent + (units - whole * WHOLE), a.spent_whole + whole
  if a.spent >= WHOLE then a.spent, a.spent_whole = a.spent - WHOLE, a.spent_whole + 1 end
  local born = math.floor(born_ms / DAY_MS)
  if units >= 0 or born == a.day then a.day_spent = more(a.day_spent, units) end
  if units >= 0 or month_of(born) == a.month then a.month_spent = more(a.month_spent, units) end
end

local function pays(limit) return limit.prepaid == 1 or limit.day >= 0 or limit.month >= 0 end
