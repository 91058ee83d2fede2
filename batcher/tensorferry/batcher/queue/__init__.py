"""Everything that the queue's lock guards: put, take, finish, admission, expiry, devices."""
