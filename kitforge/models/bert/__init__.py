"""BERT (Devlin et al., 2019) and RoBERTa (Liu et al., 2019)."""
