-- order: who is next. Class first (strict), then the tenant whose head has waited longest, then arrival.
-- The tenant's score is the one place that decides fairness between tenants: a virtual token count takes the
-- place of the head's arrival there, and nothing else changes.

local function member(id, row)
  return row.class .. '|' .. row.tenant .. '|' .. string.format('%015d', row.arrival) .. '|' .. id
end

local function head(class_tenant)
  local first = '[' .. class_tenant .. '|'
  return call('ZRANGEBYLEX', WAITING, first, first .. '\255', 'LIMIT', 0, 1)[1]
end

-- The tenant's place in its class, after something joined or left its line. O(log n)
local function place_tenant(class_tenant, class)
  local first = head(class_tenant)
  if not first then
    call('ZREM', TENANTS, class_tenant)
    return
  end
  local arrival = tonumber(string.match(first, '|(%d+)|[^|]*$'))
  call('ZADD', TENANTS, class * CLASS_STRIDE + arrival, class_tenant)
end

local function join(id, row) -- into the line
  row.state = 'waiting'
  call('ZADD', WAITING, 0, member(id, row))
  place_tenant(row.class .. '|' .. row.tenant, row.class)
  if row.deadline_ms > 0 then call('ZADD', DEADLINES, row.deadline_ms, id) end
  count('waiting' .. row.class, 1)
  count('waiting_tokens', row.input)
  wake()
end

local function leave(id, row) -- out of the line
  call('ZREM', WAITING, member(id, row))
  place_tenant(row.class .. '|' .. row.tenant, row.class)
  call('ZREM', DEADLINES, id)
  count('waiting' .. row.class, -1)
  count('waiting_tokens', 0 - row.input) -- not `-row.input`: HINCRBY refuses Lua's "-0"
end

local function next_id()
  local class_tenant = call('ZRANGE', TENANTS, 0, 0)[1]
  if class_tenant then return string.match(head(class_tenant), '([^|]*)$') end
end

-- An estimate of how many go first: all of higher classes, and of its own class as many of every tenant as of its own.
local function place_of(id, row)
  local ahead = 0
  for class = 0, row.class - 1 do ahead = ahead + counter('waiting' .. class) end
  local own = '[' .. row.class .. '|' .. row.tenant .. '|'
  local rank = call('ZLEXCOUNT', WAITING, own, '[' .. member(id, row))
  local tenants = call('ZCOUNT', TENANTS, row.class * CLASS_STRIDE, (row.class + 1) * CLASS_STRIDE - 1)
  return ahead + math.min(counter('waiting' .. row.class), rank * tenants)
end
