"""The pre-check with MindSpore: one recorded API call, run again on two sides and compared."""
