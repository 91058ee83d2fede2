"""Everything that the queue's one lock guards: put, take, finish, admission, expiry, devices."""
