from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.own import own_features

__all__ = ["MindSpeedFeature", "MindSpeedFeaturesManager"]
MindSpeedFeaturesManager.set_features_list(own_features())
