"""What the tests share: the table of cases, their references and tolerances, comparers, fuzzers."""
