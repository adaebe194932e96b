"""Attention's prologue: cases, inputs, and checks.

Written rows are compared byte for byte with the codec's, of the row that plain torch normalises and rotates. A norm's
fp32 sum may round a column the other way. Then a few columns may hold the neighbouring code. Q is compared with a
float64 reference, within the rounding of its dtype.
"""
