"""Tools for single operators: pre-check, free benchmark, dispatch and compile checks, online calls. No watched training needs them."""
