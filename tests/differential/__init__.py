"""Drawn inputs at every door of the kits, compared with the ecosystem's own reader or definition.

A test that fails prints the smallest input that still fails. What the ecosystem takes and Kitforge refuses stands, with
its reason, in the list REFUSED of the test's file; a refusal that is not listed fails.
"""
