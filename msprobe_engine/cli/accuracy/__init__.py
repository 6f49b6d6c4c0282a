"""Commands about single operators: is each result right?"""
