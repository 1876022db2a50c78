"""Muon, NorMuon and SOAP update whole matrices: one rank owns each where weights are sharded."""
